"""`nerfturbo view RUN`: a saved run on a live page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .common import RunArgs, opened_run
from .flags import check_within, parse

if TYPE_CHECKING:
    from ..data.scene import Scene
    from ..evaluation.run_folder import RunFolder
    from ..rendering.model import NerfModel
    from ..viewer.page import LivePage

DEFAULT_PORT = 7007


@dataclass(frozen=True)
class ViewArgs(RunArgs):
    """Open a run on a live page in the browser; Ctrl-C ends it."""

    host: str = "127.0.0.1"  # Where to listen; beyond the loopback a token is asked for, part of the address printed.
    port: int = DEFAULT_PORT  # Port to listen on; 0 takes any that is free.


def main(argv: Sequence[str]) -> int:
    args = parse(ViewArgs, argv, "view")
    check_within("--port", args.port, 0, 65535)
    check_viewer(args.host, args.port)
    with opened_run(args) as (opened, display):
        scenes = opened.views(display)
        page = open_page(opened.run, opened.model, scenes, host=args.host, port=args.port, trains=False)
        display.close()
        print(f"{page.url}  (Ctrl-C ends it)", flush=True)
        try:
            page.serve(opened.model, opened.state.step)
        except KeyboardInterrupt:
            pass
        finally:
            page.close()
    return 0


def check_viewer(host: str, port: int) -> None:
    """Refuse, before any work is done, a live page that could not be served."""
    from ..export import require_package
    from ..viewer.auth_proxy import check_address

    require_package("viser", "viser", "the live page", "viewer")
    check_address(host, port)


def open_page(
    run: RunFolder, model: NerfModel, scenes: tuple[Scene, Scene], *, host: str, port: int, trains: bool
) -> LivePage:
    """The page of a run; its camera paths go into the run's folder."""
    from ..viewer.page import LivePage
    from ..viewer.panel import SceneFacts

    train, test = scenes
    facts = SceneFacts(train.name, train, test, model.grid.aabb, run.path / "camera_paths", trains)
    return LivePage(facts, host=host, port=port)
