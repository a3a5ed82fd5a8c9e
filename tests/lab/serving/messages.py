"""Messages between the caller of servers and their processes, beside those of engines (engines/protocol.py)."""

from msgspec import Struct

from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import CPU, Kernels, Mode
from eagletwin.harness.engines.protocol import PatchDidNotApply, Refused


class Serve(Struct, frozen=True, tag=True, kw_only=True):
    """Caller -> front.py, with one end of a socket pair attached: a server of SGLang's for these checkpoints.

    model    the recipe whose checkpoints they are; "": somebody's own
    port, log  servers.py fills both in: where it listens, if that is 0, and the file of what its processes print
    more     further arguments of SGLang's launch_server, as they are typed; variables: of the environment of its processes
    None     what SGLang takes by itself
    """

    target: str
    draft: str
    port: int = 0
    log: str = ""
    model: str = ""
    topk: int = 1
    num_steps: int = 3
    num_draft_tokens: int | None = None
    page_size: int = 1
    chunked_prefill_size: int | None = None
    patches: tuple[Patch, ...] = ()
    kernels: Kernels = "fast"
    mode: Mode = CPU
    more: tuple[str, ...] = ()
    variables: dict[str, str] = {}


class Serving(Struct, frozen=True, tag=True):
    """Scheduler of a server -> supervisor -> caller: it stands, with these shims. Requests are taken a little later."""

    shims: tuple[str, ...]


class ServerEnded(Struct, frozen=True, tag=True):
    """Supervisor -> caller: no process of the server is left. `error` says what ended it; "": the caller did."""

    error: str


Said = Serving | ServerEnded | PatchDidNotApply | Refused
"""Of a server, to its caller."""
