"""Which SGLang or vLLM runs: the installed one, a published release, or a source tree as it is; and what to call it."""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from eagletwin.harness.core.differs import Watch, join_names
from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.files import cache_folder, installed_version
from eagletwin.harness.core.run_spec import ENGINES, TITLES, Engine

from .difference import (
    DOCUMENTS,
    Difference,
    File,
    content_of,
    difference,
    since_commit,
    since_release,
    watch_of,
)
from .provision import (
    Section,
    changed_since_release,
    files_below,
    files_of_package,
    is_there,
    kind_of,
    lock,
    provide,
    record_of,
    releases,
    remembered,
)

_MANY = 300  # files that differ from HEAD byte for byte


@dataclass(frozen=True, slots=True)
class Source:
    """An engine's code. `paths` come before everything else on the engine processes' sys.path; empty: what is installed here.

    name     what the user called it: "" of the installed one, a release, or a folder
    version  what traces call it: the release, or the commit of a tree, with a digest of what was changed in it since; "" of the
             installed one, which knows its own
    difference  what was changed in a tree since; None: nothing, or the originals are missing
    base     the one that it is a change of, where one is named (two_trees.as_change)
    engine   whose it is; its package has that name
    """

    name: str = ""
    paths: tuple[Path, ...] = ()
    version: str = ""
    difference: Difference | None = None
    base: "Source | None" = None
    engine: Engine = "sglang"

    @property
    def called(self) -> str:
        """What to call it where nothing was imported yet."""
        return self.version or installed_version(self.engine)

    @property
    def root(self) -> Path:
        """The folder that holds its package."""
        if self.paths:
            return self.paths[0]
        found = importlib.util.find_spec(self.engine)
        assert found is not None
        assert found.submodule_search_locations
        return Path(found.submodule_search_locations[0]).parent

    @property
    def tree(self) -> str:
        """The folder that was named; "" if none was."""
        return self.name if self.name != self.version else ""


INSTALLED = Source()


def resolve(name: str, engine: Engine = "sglang") -> Source:
    """The code of this name, fetched if need be; without a name the installed SGLang, or vLLM's newest known release. Raises
    InputError for an unknown name, NotFetched if fetching failed."""
    if engine == "sglang" and name in ("", installed_version("sglang")):
        return _installed_source()
    name = name or releases(engine)[-1]
    section = lock().get(f"{kind_of(engine)}/{name}")
    if section is not None:
        return _release(section, engine)
    if Path(name).is_dir():
        return _tree(Path(name).absolute(), engine)
    older = ENGINES[engine].older
    raise InputError(
        f"{name!r} is neither a release nor a folder",
        consequence="nothing was run",
        remedy="; ".join(
            filter(None, (f"use a source tree of {TITLES[engine]} or one of {', '.join(releases(engine))}", older))
        ),
    )


def _release(section: Section, engine: Engine) -> Source:
    folder = provide(section)
    return Source(section.name, (folder, *(_layers(folder) if engine == "sglang" else ())), section.name, engine=engine)


def at_hand(release: str, engine: Engine = "sglang") -> Source | None:
    """A release, unchanged: the installed one, or the cache's. None: it is not here. Raises NotFetched for a damaged one."""
    if engine == "sglang" and release == installed_version("sglang") and not (source := _installed_source()).tree:
        return source
    section = lock().get(f"{kind_of(engine)}/{release}")
    return None if section is None or not is_there(section) else _release(section, engine)


def here(engine: Engine = "sglang") -> tuple[str, ...]:
    """The known releases that need no network, oldest first."""
    of_here = installed_version("sglang") if engine == "sglang" else ""
    return tuple(name for name in releases(engine) if name == of_here or is_there(lock()[f"{kind_of(engine)}/{name}"]))


def _installed_source() -> Source:
    """The installed one: by its content, if it was edited in place or is a checkout."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return INSTALLED
    root = Path(found.submodule_search_locations[0]).parent
    wheels = [metadata.parent.name for metadata in root.glob("sglang-*.dist-info/METADATA")]
    if wheels and changed_since_release(root, wheels[0], by_time=True) == {}:
        return INSTALLED
    return _tree(root, "sglang") if wheels or (root / "sglang" / "__init__.py").is_file() else INSTALLED


def _tree(folder: Path, engine: Engine) -> Source:
    """A source tree. vLLM's finds the packages that it alone needs in the newest release."""
    for root in (folder, folder / "python"):
        if (root / engine / "__init__.py").is_file():
            version, difference = _identity(root, engine)
            if difference is not None and difference.watch.differs.unlisted:
                _warn_unlisted(root, difference)
            further = _layers(root) if engine == "sglang" else resolve("", engine).paths
            return Source(str(folder), (root, *further), version, difference, engine=engine)
    raise InputError(
        f"{folder} holds no {engine}",
        consequence="nothing was run",
        remedy=f"name the root of a checkout, or the folder of {engine}/",
    )


def _identity(root: Path, engine: Engine) -> tuple[str, Difference | None]:
    """The commit, else the wheel's version, and what was changed since; "+dirty." and a digest of that are part of the name.
    Without either, a digest of the files."""
    commit = _head(root)
    if commit and _git(root, "ls-files", f"{engine}/__init__.py"):  # else the repository around it is another
        return _add_dirty_suffix(commit, _since_head(root, commit, engine))
    for metadata in root.glob(f"{engine}-*.dist-info/METADATA"):
        found = re.search(r"^Version: (\S+)", metadata.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            changes = changed_since_release(root, metadata.parent.name, record_of(found[1], engine))
            if changes is None:  # a wheel whose RECORD cannot be read
                return f"{found[1]}+dirty.{_digest_of_all(root, engine)[:8]}", None
            return _add_dirty_suffix(found[1], since_release(root, found[1], changes))
    return f"tree-{_digest_of_all(root, engine)[:10]}", None


def _add_dirty_suffix(base: str, difference: Difference | None) -> tuple[str, Difference | None]:
    return base + (f"+dirty.{difference.digest}" if difference is not None else ""), difference


def _digest_of_all(root: Path, package: str) -> str:
    digest = hashlib.sha256()
    for name in sorted(name for name in files_below(root / package) if name.endswith(".py")):
        digest.update(f"{package}/{name}".encode() + b"\0" + (root / package / name).read_bytes())
    return digest.hexdigest()


def _since_head(root: Path, commit: str, package: str) -> Difference | None:
    """How the package differs from HEAD: in changed files, staged or not, and in those that git neither tracks nor ignores.

    Each file of HEAD is compared by its content: git goes by time and size, to the second, and passes over files that it was
    told not to look at (assume-unchanged, skip-worktree). Where many differ, a checkout writes them in another way than HEAD
    has them, and git says which of them were changed, by an index that knows nothing but HEAD. A link in the place of a file
    or folder counts by what it leads to, which git does not read.
    """
    names = ("--name-only", "--no-renames", "--relative", "-z", "HEAD", "--")
    staged = _git_list(root, "diff", "--cached", *names, package)  # one of them may be ignored
    blobs, further = _blobs_of_head(root, package)
    changed = [path for path, blob in blobs.items() if not _is_blob(root / path, blob)]
    with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
        index = Path(scratch, "index")
        _git_list(root, "read-tree", "HEAD", index=index)
        if len(changed) > _MANY:
            changed, further = [], [package]
        if further:
            changed += _git_list(root, "diff", *names, *further, index=index)
        untracked = _git_list(root, "ls-files", "--others", "--exclude-standard", "-z", "--", package, index=index)
    listed = dict.fromkeys(file for path in (*staged, *changed, *untracked) for file in _behind(root, path))
    paths = [path for path in listed if path not in blobs or not _is_blob(root / path, blobs[path])]
    return since_commit(root, commit, paths, [_of_head(root, path) for path in paths])


def _behind(root: Path, path: str) -> list[str]:
    """The files that a path leads to: those of the folder, where it is a link to one."""
    place = root / path
    return [f"{path}/{name}" for name in files_below(place)] if place.is_symlink() and place.is_dir() else [path]


def _blobs_of_head(root: Path, package: str) -> tuple[dict[str, str], list[str]]:
    """The digest that git has of each file of the package in HEAD, and what is no file: links, submodules."""
    entries = [entry.partition("\t") for entry in _git_list(root, "ls-tree", "-r", "-z", "HEAD", "--", package)]
    blobs = {path: about.split()[2] for about, _, path in entries if about.startswith("100")}
    return blobs, [path for *_, path in entries if path not in blobs]


def _is_blob(file: Path, blob: str) -> bool:
    """Whether a file has the content that git has by this digest; one whose line ends a checkout writes anew has not."""
    of = "sha1" if len(blob) == 40 else "sha256"
    with suppress(OSError):  # it is gone, or a folder
        return blob == remembered(file, of, lambda content: hashlib.new(of, b"blob %d\0" % len(content) + content).hexdigest())
    return False


def _git_list(root: Path, *words: str, index: Path | None = None) -> list[str]:
    """What git lists, with -z. Raises HarnessError if it fails: a list that is missing must not be taken for an empty one."""
    done = _run_git(root, *words, index=index)
    if done is None or done.returncode:
        raise HarnessError(
            f"git {words[0]} fails in {root}: {_git_error(done)}",
            consequence="nothing was run: whether the tree was changed since its commit is not known",
            remedy=f"see that `git -C {root} status` works",
        )
    return [entry for entry in os.fsdecode(done.stdout).split("\0") if entry]


def _of_head(root: Path, path: str) -> bytes | None:
    """A file as HEAD has it, with line ends as a checkout writes them; None if it has none."""
    done = _run_git(root, "cat-file", "--filters", f"HEAD:./{path}")
    return done.stdout if done is not None and done.returncode == 0 else None


def _warn_unlisted(root: Path, difference: Difference) -> None:
    files, base = join_names(difference.watch.differs.unlisted), difference.base
    print(
        f"note: the originals of {files}, which {root} changes, are not at hand: each function in them counts as changed. "
        f"`eagletwin info releases fetch {base}` brings those of a known release",
        file=sys.stderr,
    )


def _head(root: Path) -> str:
    """The commit of the repository around a folder; "" if there is none. A note tells of one that git does not read."""
    done = _run_git(root, "rev-parse", "--short=10", "HEAD")
    if done is not None and done.returncode == 0:
        return os.fsdecode(done.stdout).strip()
    around = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    if around is not None:
        print(
            f"note: git does not read the repository {around}: {_git_error(done)}\n"
            f"  so:  {root} is called by its files, or its dist-info, and what was changed since the commit is not known\n"
            f"  try: git config --global --add safe.directory {around}, if another user owns it",
            file=sys.stderr,
        )
    return ""


def _git_error(done: "subprocess.CompletedProcess[bytes] | None") -> str:
    """The first line of what git said of a failure."""
    lines = os.fsdecode(done.stderr).strip().splitlines() if done is not None else ["git cannot be started"]
    return lines[0] if lines else "it says nothing"


def _git(root: Path, *words: str) -> str:
    """What git says of a folder; "" if nothing: no repository, or no git."""
    done = _run_git(root, *words)
    return os.fsdecode(done.stdout) if done is not None and done.returncode == 0 else ""


def _run_git(root: Path, *words: str, index: Path | None = None) -> "subprocess.CompletedProcess[bytes] | None":
    """What git does in a folder, by another index than the repository's if one is given; None if there is no git."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's, a bisection's
    try:
        return subprocess.run(
            ["git", "-C", str(root), "-c", "core.fsmonitor=false", "-c", "core.sparseCheckout=false", *words],
            env=environment | ({} if index is None else {"GIT_INDEX_FILE": str(index)}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError:
        return None


def _layers(root: Path) -> tuple[Path, ...]:
    """Packages that this SGLang pins and this environment has in another version: transformers, and what goes with it."""
    files = [file for file in (*root.glob("sglang-*.dist-info/METADATA"), root / "pyproject.toml") if file.is_file()]
    if not files:
        print(
            f"note: {root} names no pin of transformers (no pyproject.toml, no sglang-*.dist-info); it runs with "
            f"{installed_version('transformers')}, as its traces say. A copy of a release needs its dist-info next to it",
            file=sys.stderr,
        )
    for file in files:
        pin = re.search(r"(?<![\w-])transformers==([\w.]+)", file.read_text(encoding="utf-8"))
        if pin is None or pin[1] == installed_version("transformers"):
            continue
        section = lock().get(f"layers/transformers-{pin[1]}")
        if section is not None:
            return (provide(section),)
        print(
            f"note: {root} pins transformers {pin[1]}, which is not in eagletwin's lock file; "
            f"it runs with {installed_version('transformers')}, as its traces say",
            file=sys.stderr,
        )
    return ()


# A unified diff as an engine's code: a tree of hard links to a release, in the cache, with the diff applied. Evidence of it is
# that of a tree: code outside of functions and Triton kernels count.

_PATH = re.compile(r"^(?:---|\+\+\+) ([^\t\n]+)", re.MULTILINE)


def is_diff(file: Path) -> bool:
    """Whether a patch file is a unified diff, and not JSON."""
    try:
        return not file.read_bytes().lstrip().startswith(b"{")
    except OSError:
        return False  # whoever reads it as JSON says why it cannot be read


def patched_tree(source: Source, file: Path) -> Path:
    """The folder of the release with the diff applied; made once for each content. Paths in the diff may begin anywhere above
    the package; documents and tests outside of it are left out. Raises InputError, also for other files outside."""
    text, package = file.read_bytes(), source.engine
    wheels = [*source.root.glob(f"{package}-*.dist-info")]
    if source.difference is not None or len(wheels) != 1:
        raise _input_error(
            f"{file} is a diff, and {source.name or TITLES[package]} is not a release", "apply it to that tree: git apply"
        )
    depth = _depth(file, text.decode(errors="replace"), source.root, package)
    digest = hashlib.sha256(f"{wheels[0].name}\0{depth}\0".encode() + text).hexdigest()[:16]
    place = cache_folder("patched") / f"{file.stem}-{digest}"
    if place.is_dir():
        return place
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        root = Path(scratch, "tree")
        link_tree((source.root / package, wheels[0]), root)
        _apply(file, text, depth, root, package)
        try:
            root.rename(place)
        except OSError:  # another process has just made it
            if not place.is_dir():
                raise
    return place


def _depth(file: Path, text: str, root: Path, package: str) -> int:
    """How many folders stand before the package in the diff's paths, so that most of them are files of the release."""
    paths = dict.fromkeys(path.strip('"') for path in _PATH.findall(text) if path != "/dev/null")
    depths = Counter[int]()
    for parts in (path.split("/") for path in paths):
        depths.update({number: 1 + len(paths) * root.joinpath(*parts[number:]).is_file() for number in _places(parts, package)})
    for depth, _ in depths.most_common(1):
        outside = [path for path in paths if path.split("/")[depth : depth + 1] != [package] and not _is_aside(path)]
        if outside:
            raise _input_error(
                f"{file} also changes {join_names(outside)}, outside of {package}/: nothing here runs it",
                f"leave it out of the diff: git diff … -- {'python/' if package == 'sglang' else ''}{package}",
            )
        return depth
    raise _input_error(
        f"{file} is neither JSON nor a unified diff of files below {package}/", "docs/reference/patch.md shows both"
    )


def _places(parts: list[str], package: str) -> list[int]:
    """Where the package may begin in a path."""
    return [number for number, part in enumerate(parts[:-1]) if part == package and not parts[-1].endswith(DOCUMENTS)]


def _is_aside(path: str) -> bool:
    """Whether a path of a diff is documentation or a test."""
    return path.endswith(DOCUMENTS) or not {"test", "tests", "docs", ".github"}.isdisjoint(path.split("/"))


def _apply(file: Path, text: bytes, depth: int, root: Path, package: str) -> None:
    environment = {**os.environ, "GIT_DIR": str(root / "no-repository"), "GIT_CEILING_DIRECTORIES": str(root.parent)}
    words = ["git", "apply", f"-p{depth}", f"--include={package}/*", "--whitespace=nowarn", "-"]
    try:
        done = subprocess.run(words, cwd=root, input=text, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise _input_error(f"git cannot be started: {error}", "install git, which applies diffs") from error
    if done.returncode:
        said = os.fsdecode(done.stderr).strip().splitlines()
        raise _input_error(f"{file} does not apply: {said[0] if said else 'git does not say why'}", "make it from that release")


def link_tree(folders: Iterable[Path], root: Path, *left_out: str) -> None:
    """A copy of these folders in `root`, of hard links where that is possible, without bytecode and what has these names."""
    ignore = shutil.ignore_patterns("__pycache__", *left_out)
    for folder in folders:
        shutil.copytree(folder, root / folder.name, copy_function=_link, ignore=ignore, symlinks=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another device
        shutil.copy2(source, target)


def _input_error(cause: str, remedy: str) -> InputError:
    return InputError(cause, consequence="nothing was run", remedy=remedy)


# In what two of an engine differ from one another, whatever each was made from: every file of the package, by its content.
#
# A branch whose changes are all committed differs from its own HEAD in nothing, and from the base that it is compared with in
# just what its author asks about.

MOST = 300  # Python files that differ: two neighbouring releases differ in some 2,000, whose functions take minutes to list


class TooMany(Exception):
    """More Python files differ than are looked at: the two are other releases, and not a change and its base."""


def between(left: Source, right: Source) -> tuple[Watch, Watch] | None:
    """What the engines of each are to watch: in what it differs from the other. None: no file differs. Raises TooMany."""
    files = _files(left, right)
    if not files:
        return None
    back = [File(file.path, file.new, file.old) for file in files]
    return watch_of(right.called, back), watch_of(left.called, files)


def as_change(source: Source, base: str) -> Source:
    """The source as a change of a release or folder: what its engines watch, and a run folder keeps, is in what it differs from
    that, unless it differs in too much. "": as it is. Raises InputError, NotFetched."""
    if not base:
        return source
    found = resolve(base, source.engine)
    with suppress(TooMany):
        return replace(source, base=found, difference=difference(found.called, _files(found, source)))
    return replace(source, base=found)


def _files(left: Source, right: Source) -> list[File]:
    """The files that differ: of the left as old, of the right as new. Raises TooMany."""
    roots = left.root, right.root
    names = sorted(files_of_package(roots[0], left.engine) | files_of_package(roots[1], right.engine))
    contents = ((name, content_of(roots[0] / name), content_of(roots[1] / name)) for name in names)
    differ = [File(name, one, other) for name, one, other in contents if one != other]
    if sum(file.path.endswith(".py") for file in differ) > MOST:
        raise TooMany(f"they differ in {len(differ)} files")
    return differ


# The engine that this very process imports, such as that of pytest: it is put in place before the first import, and none
# is imported here. Engine processes get theirs through PYTHONPATH (start.py).


def use(source: Source) -> None:
    """Make this process import the engine of `source`. Raises HarnessError if it has imported another one."""
    for path in reversed([str(path) for path in source.paths]):
        with contextlib.suppress(ValueError):
            sys.path.remove(path)
        sys.path.insert(0, path)
    expected, module = init_file(source), sys.modules.get(source.engine)
    if module is None or expected is None:
        return
    found = module.__file__
    if found is None or not Path(found).parent.samefile(expected.parent):  # the files themselves may be links to one
        raise HarnessError(
            f"this process has already imported the {TITLES[source.engine]} in {found}, and the one in {expected} is wanted",
            consequence=f"nothing was run: the results would be those of another {TITLES[source.engine]}",
            remedy="run these tests in a process of their own",
        )


def init_file(source: Source) -> Path | None:
    """Path of the package's `__init__.py`, without importing it. None if it has no such file."""
    if source.paths:
        return source.paths[0] / source.engine / "__init__.py"
    module = sys.modules.get(source.engine)
    if module is not None:
        return Path(module.__file__) if module.__file__ else None
    found = importlib.util.find_spec(source.engine)
    return Path(found.origin) if found is not None and found.origin else None
