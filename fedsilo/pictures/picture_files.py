"""Write figures to files: PNG, SVG or PDF, by the ending of the file's name.

PNG is for the screen, SVG for a web page and PDF for a paper. Equal figures give equal bytes,
because no file has the time of drawing. Importing this module does not import matplotlib.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.core.arguments import AnyPath, path_of
from fedsilo.core.drawing.glyphs import fonts_for
from fedsilo.core.errors import SettingError
from fedsilo.core.files.atomic_files import write_atomically
from fedsilo.core.one_line import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".png", ".svg", ".pdf")
_DPI = 120  # resolution of PNG pictures; other formats have no pixels
# Metadata would have the time of drawing and the version of matplotlib
_NO_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
# Text stays text, so that it can be searched and edited. Journals refuse matplotlib's default fonts
# in PDF files (type 3). Without a salt, matplotlib would draw the ids in an SVG file at random
_OPTIONS: Any = {"svg.fonttype": "none", "svg.hashsalt": "fedsilo", "pdf.fonttype": 42}


def picture_path(given: AnyPath | None) -> Path | None:
    """Convert the name of a picture to a path, and check that its ending is known.

    None stays None. Endings in upper case are accepted too: ``A.PDF`` is a PDF.

    Raises:
        SettingError: the name does not end with .png, .svg or .pdf.
    """
    path = path_of(given)
    if path is not None and path.suffix.lower() not in ENDINGS:
        *others, last = ENDINGS
        raise SettingError(
            f"a picture's name must end with {', '.join(others)} or {last}, but is "
            f"'{one_line(path)}': name the file {one_line(path.stem)}.png"
        )
    return path


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure as PNG, SVG or PDF, according to the ending of ``path``.

    An existing file is replaced. If writing fails, no incomplete file is left.

    Raises:
        SettingError: ``path`` does not end with .png, .svg or .pdf.
    """
    import matplotlib

    picture_path(path)
    kind = path.suffix.lower().removeprefix(".")
    picture = io.BytesIO()
    with matplotlib.rc_context(_OPTIONS), fonts_for(figure):
        figure.set_dpi(_DPI)
        canvas = _make_canvas(kind, figure)
        # 'savefig' would draw all of it twice
        getattr(canvas, f"print_{kind}")(picture, metadata=_NO_METADATA[kind])
    write_atomically(path, picture.getvalue())


def write_for_screen_and_paper(path: Path, figure: Figure) -> list[Path]:
    """Write a figure as PNG to ``path``, and as PDF to the same path with the ending .pdf.

    The result has both paths. The call turns off the figure's layout engine, so matplotlib does not
    arrange parts that are added later.
    """
    paths = [path, path.with_suffix(".pdf")]
    for one in paths:
        write_picture(one, figure)
        # The layout takes most of the time, and it is the same for both
        figure.set_layout_engine("none")
    return paths


def _make_canvas(kind: str, figure: Figure) -> Any:
    """Build the matplotlib canvas that renders a figure as 'png', 'svg' or 'pdf'.

    Only the backend for ``kind`` is imported, because each import takes time. ``kind`` is not
    checked: any other text counts as 'png'.
    """
    if kind == "svg":
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        return FigureCanvasSVG(figure)
    if kind == "pdf":
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        return FigureCanvasPdf(figure)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return FigureCanvasAgg(figure)
