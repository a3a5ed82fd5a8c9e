"""The figures as a picture: matplotlib draws it, which is an extra."""

from pathlib import Path

from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.harness.deserved.figures import Figures


def must_draw(file: Path) -> None:
    """Raises before anything is measured if the picture could not be drawn or written."""
    if file.suffix != ".svg" or not file.absolute().parent.is_dir():
        raise InputError(
            f"--plot {file} names no SVG file in a folder that there is",
            consequence="the figures could not be drawn",
            remedy="name a file that ends in .svg",
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EagletwinError(
            f"matplotlib cannot be imported: {error}",
            consequence="the figures could not be drawn",
            remedy="pip install 'eagletwin[plot]', or leave --plot out",
        ) from error


def draw(found: Figures, file: Path) -> None:
    """Write an SVG with three panels: by draft position, by length of the prompt, by place behind it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "eagletwin"  # the same figures are the same file
    from matplotlib import pyplot

    figure, (depths, lengths, places) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    numbers = [depth.depth for depth in found.depths]
    for name, marker in (("conditional", "o-"), ("cumulative", "s--")):
        intervals = [getattr(depth, name) for depth in found.depths]
        errors = [[max(0.0, i.value - i.low) for i in intervals], [max(0.0, i.high - i.value) for i in intervals]]
        depths.errorbar(numbers, [i.value for i in intervals], errors, fmt=marker, capsize=3, label=name)
    depths.set(title="accepted, by draft position", xlabel="draft position", ylim=(0, 1), xticks=numbers)
    depths.legend()
    for panel, parts, title in (
        (lengths, found.by_prompt_length, "length of the prompt"),
        (places, found.by_place, "place behind the prompt"),
    ):
        panel.bar([f"{part.begin}" for part in parts], [part.accepted for part in parts])
        panel.set(title=f"drafts accepted, by {title}", xlabel=f"{title}, from", ylim=(0, len(found.depths)))
    figure.suptitle(f"accept length deserved: {found.accept_length.value:.3f}, {found.texts} texts")
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)
