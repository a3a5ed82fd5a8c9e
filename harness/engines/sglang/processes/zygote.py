"""The process that imports SGLang once and forks the rest (engines/inside/forking.py).

A crash, hang or leak of a case ends with its runner. Each process dies with its parent. Forked by ancestor.py, or, where this
SGLang needs other packages of others, started by engines/start.py as
`python -m eagletwin.harness.engines.sglang.processes.zygote FD [VERSION ROOT [CHANGES]]`.
"""

import gc
import socket
import sys
from typing import NoReturn

from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.inside.importing import import_named, import_or_report
from eagletwin.harness.families import RECIPES, family_of
from eagletwin.harness.families.weights import model_pair


def main(*, failed: BaseException | None = None, follow: bool = False) -> None:
    """Serve the caller until it hangs up. failed: what was raised when others' packages were imported; follow: an edited tree,
    in a fork of the process that has imported it"""

    def load() -> None:
        if failed is not None:
            raise failed
        (_follow_edit if follow else _import_sglang)()

    _serve(import_or_report(load))


def import_edited() -> BaseException | None:
    """Import a tree whose edits forks of this process follow; what that raised."""
    from eagletwin.harness.engines.inside import changes

    try:
        with changes.followed():
            _import_sglang()
    except BaseException as error:
        return error
    return None


def _follow_edit() -> None:
    from eagletwin.harness.engines.inside import changes

    from .. import adapter, kernels

    changes.follow(adapter.PACKAGE, *sys.argv[2:])
    kernels.precompile()


def _serve(connection: socket.socket) -> None:
    """Say that SGLang is imported; then fork what the callers ask for until the first of them hangs up."""
    from eagletwin.harness.engines.inside import forking, own_loader

    from .. import adapter
    from .. import call_function as probes
    from . import engine
    from . import rank_group as ranks

    def build(theirs: socket.socket, message: protocol.Build) -> NoReturn:
        if message.mode.processes > 1:
            ranks.serve(theirs, message, engine.launch_rank)
        engine.serve(theirs, message)

    forks: forking.Forks = {protocol.Build: build, protocol.Probe: probes.serve}
    forking.serve_callers(connection, own_loader.version(adapter.PACKAGE), forks, _before_a_fork)


def _import_sglang() -> None:
    """That which was asked for, with all that engines need of it. Raises what its import raises."""
    from .. import adapter, kernels
    from ..boot import boot

    import_named(adapter.PACKAGE, sys.argv[2:], boot.import_sglang)
    kernels.precompile()


def _before_a_fork(message: object) -> None:
    """Make the model, and import what an engine needs, once for all like it. Of a changed tree each engine says itself what it
    imported."""
    from eagletwin.harness.engines.inside.forking import left_to_the_engine

    from .. import kernels
    from ..boot import registry
    from ..graphs.install import prepare_gates

    if not isinstance(message, protocol.Build):
        return
    with left_to_the_engine():
        model_pair(message.configuration.model)
    if len(sys.argv) <= 4:
        recipe = RECIPES[message.configuration.model]
        registry.prepare(family_of(recipe).modules)
        if recipe.target.states:
            with left_to_the_engine():
                kernels.precompile_for_states()
        if message.mode.graphs and message.mode.device == "cpu":
            prepare_gates(frozen=recipe.frozen)
    gc.freeze()


if __name__ == "__main__":
    main()
