"""`nerfturbo view RUN`: a saved run on a live page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..errors import InputError
from .parse import parse

if TYPE_CHECKING:
    from ..data.scene import Scene
    from ..evaluation.run_folder import RunFolder
    from ..rendering.model import NerfModel
    from ..viewer.page import LivePage

DEFAULT_PORT = 7007


@dataclass(frozen=True)
class ViewArgs:
    """Open a run on a live page in the browser; Ctrl-C ends it."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than the loopback asks for a token, which is part of the address printed."""
    port: int = DEFAULT_PORT
    """Port to listen on; 0 takes any that is free."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """The scene folder, where it is not the one of training any more."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Who runs the operations: numba (cpu), triton, or plain torch (reference)."""


def main(argv: Sequence[str]) -> int:
    """Load, serve until interrupted."""
    args = parse(ViewArgs, argv, "view")
    check_port(args.port, "--port")
    check_viewer(args.host, args.port)
    from .common import chosen_backend, load_run, open_views, with_data
    from .progress import showing
    from .settings import resolve_device

    with showing() as display, chosen_backend(args.backend):
        opened = load_run(args.run, resolve_device(args.device))
        config = with_data(opened.config, args.data)
        display.phase(f"opening {config.data.source}")
        scenes = open_views(config, opened.model)
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
    import importlib.util

    from ..viewer.auth_proxy import check_address

    if importlib.util.find_spec("viser") is None:
        raise InputError("viser", "installed, for the live page", "not found", "pip install 'nerfturbo[viewer]'")
    check_address(host, port)


def check_port(port: int, flag: str) -> None:
    """A port that can be listened on."""
    if not 0 <= port < 65536:
        raise InputError(flag, "0 to 65535", str(port))


def open_page(
    run: RunFolder, model: NerfModel, scenes: tuple[Scene, Scene], *, host: str, port: int, trains: bool
) -> LivePage:
    """The page of a run; its camera paths go into the run's folder."""
    from ..viewer.page import LivePage
    from ..viewer.panel import SceneFacts

    train, test = scenes
    facts = SceneFacts(train.name, train, test, model.grid.aabb, run.path / "camera_paths", trains)
    return LivePage(facts, host=host, port=port)
