"""The `nerfturbo` command: finds the verb, imports it alone, runs it, and turns errors into one line and an exit code:
0 done; 1 `doctor` found something broken; 2 bad input or bad flags; 130 interrupted."""

import _thread
import contextlib
import importlib
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from ..errors import InputError, NerfturboError, did_you_mean, is_out_of_memory
from .progress import restart_clock

# torch's libraries read these when they are loaded, which is later. Without the first, memory that a step frees goes
# back to the system and returns page by page in the next one, about 8% of a step on a CPU; without the second, OpenMP's
# idle threads spin on cores that other kernels could use.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# verb -> (module, function, what it does); a verb of two words is a command and its subcommand
VERBS: dict[str, tuple[str, str, str]] = {
    "train": ("train", "main", "train on a scene folder or a built-in scene and write a run folder"),
    "batch": ("batch", "main", "train many scenes one after the other or side by side; resumes where it stopped"),
    "eval": ("evaluate", "score", "score a run on its test views again and renew its report"),
    "render": ("render", "render", "render a camera path of a run as GIF, MP4 or PNG files"),
    "process": ("scene", "process", "find the poses of photos or of a video, by COLMAP, and write a scene folder"),
    "view": ("render", "view", "open a run in the viewer, in the browser"),
    "inspect": ("evaluate", "inspect", "draw density, transmittance, weights and cells along the ray of one pixel"),
    "compare": ("evaluate", "compare", "compare runs in one table and on one page"),
    "export mesh": ("export", "mesh", "write the surface of a run as a mesh: .glb, .ply, .obj or .usdz"),
    "export points": ("export", "points", "write a point cloud of a run with colours and normals: .ply"),
    "export splats": ("export", "splats", "write a run as 3D Gaussians for splat viewers: .ply, .splat or .html"),
    "export grid": ("export", "grid", "write the occupancy grid of a run: .npz"),
    "export cameras": ("export", "cameras", "write the cameras of a run, as they were learned: .json"),
    "export nerfstudio": ("export", "nerfstudio", "write the cameras and a path of a run for nerfstudio: a folder"),
    "export onnx": ("export", "onnx", "write the field of a run for other inference engines: .onnx"),
    "export web": ("export", "web", "write a page that shows a run in any browser, in real time: .html"),
    "scene info": ("scene", "info", "say what a scene folder holds"),
    "scene check": ("scene", "check", "say whether the poses of a scene are right, by features that its images share"),
    "scene write": ("scene", "write", "write a built-in scene to disk in Blender's format"),
    "tune": ("bench", "tune", "find the largest batch that fits and a learning rate, and write a config"),
    "profile": ("bench", "profile", "say where time and memory of a step go, with a trace for the browser"),
    "doctor": ("doctor", "main", "check this machine and say what to do about what does not work"),
    "bench step": ("bench", "step", "time a whole training step against the reference"),
    "bench scene": ("bench", "scene", "train a scene and score it at marks on the way"),
    "bench compare": ("bench", "compare", "compare two results of one benchmark"),
    "bench render": ("bench", "render", "check and time the frames of a trained run"),
    "warmup": ("startup", "warmup", "compile all kernels now, so that the first training starts at once"),
}

STUDIES = ("bench ops", "bench precision", "bench ablation", "bench trainers")  # now scripts of the folder benchmarks

MEMORY_HINT = "lower --train.batch-samples (nerfturbo tune finds what fits) or shrink the images by --downscale"
AGAIN_AFTER = 0.05  # seconds: by then C has usually left the callback; if not, it is dropped and comes again


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if argv is not None:
        restart_clock(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name may be no text at all
    verb, rest = _split(arguments)
    if rest[:1] == ["--install-completion"]:
        from .completion import install

        return run_command(lambda: install(rest[1:], VERBS, _run))
    return run_command(lambda: _overview(arguments) if verb is None else _run(verb, rest))


def _run(verb: str, rest: list[str]) -> int:
    module, function, _ = VERBS[verb]
    return getattr(importlib.import_module(f".{module}", __package__), function)(rest)


def run_command(command: Callable[[], int]) -> int:
    """Its exit code, or that of what stopped it, said in one line on stderr."""
    try:
        with interrupts_arrive(), contextlib.ExitStack() as end:
            end.callback(print, end="", flush=True)  # here, where a reader of a pipe that left is no error
            return command()
    except NerfturboError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        sys.unraisablehook = lambda found: None  # the finalizers of what it left half made: LLVM's modules, say
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (head, less) left: not an error, and nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(f"{error.filename or 'input or output'}: {error.strerror or error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return _fail(f"memory: expected enough for this, ran out ({reason}); {MEMORY_HINT}")


@contextlib.contextmanager
def interrupts_arrive() -> Iterator[None]:
    """Inside, SIGTERM interrupts as Ctrl-C does, and neither is lost. For the main thread; others change nothing. Both
    become a KeyboardInterrupt in whatever Python code runs, but wait while numba compiles or loads a kernel: LLVM, left
    half done, crashes at its next use. If C called that code, an exception cannot go on through it: ctypes drops it
    after a note, and so do finalizers. What is dropped is raised again a moment later. Other C code (safetensors) makes
    another error of it: an error after an interrupt is that interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []
    came: list[int] = []

    def again() -> None:
        timers.append(threading.Timer(AGAIN_AFTER, _signal_main_thread))
        timers[-1].start()

    def interrupt(number: int, frame: FrameType | None) -> None:
        compiler = sys.modules.get("numba.core.compiler_lock")
        if compiler is not None and compiler.global_compiler_lock.is_locked():
            return again()
        came.append(number)
        signal.default_int_handler(number, frame)

    def dropped(found: "sys.UnraisableHookArgs") -> None:
        again() if issubclass(found.exc_type, KeyboardInterrupt) else report(found)

    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        if before[number] != signal.SIG_IGN:  # as `nohup` and `&` in scripts ask
            signal.signal(number, interrupt)
    report, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    except Exception as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a timer may be raising it just now
        for timer in timers:
            timer.cancel()
            if timer.is_alive():  # not one whose start was interrupted
                timer.join()
        sys.unraisablehook = report
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # a real one: it ends a sleep, too
    else:
        _thread.interrupt_main(signal.SIGTERM)


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    for n_words in (2, 1):
        if (verb := " ".join(arguments[:n_words])) in VERBS:
            return verb, arguments[n_words:]
    return None, arguments


def _overview(arguments: list[str]) -> int:
    """The list of verbs, and what was wrong where something was."""
    from .. import __version__

    word = arguments[0] if arguments else ""
    if word in ("--version", "-V"):
        print(f"nerfturbo {__version__}")
        return 0
    group = {verb: entry for verb, entry in VERBS.items() if verb.split()[0] == word}
    asked = not arguments or word in ("--help", "-h") or (group and arguments[1:] in (["--help"], ["-h"]))
    lines = [f"usage: nerfturbo {word if group else 'COMMAND'} ...", ""]
    lines += [f"  {verb:<17}  {help_text}" for verb, (_, _, help_text) in (group or VERBS).items()]
    lines += ["", "Every command explains itself: nerfturbo COMMAND --help. NERFTURBO_DEBUG=1 shows tracebacks."]
    lines += ["nerfturbo --install-completion [bash | zsh | fish] completes commands and flags by the tab key."]
    wrong = " ".join(arguments[:2]) if group else word
    hint = "" if wrong == word and group else _meant(wrong.split()[-1], group or VERBS) if wrong else ""
    hint = f"did you mean python benchmarks/{arguments[1]}.py?" if wrong in STUDIES else hint
    if asked or group or not hint:
        print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else _fail(str(InputError("command", "one that `nerfturbo --help` lists", repr(wrong), hint)))


def _meant(word: str, verbs: dict[str, tuple[str, str, str]]) -> str:
    """Of a word that is none of these commands, the one it is near to, or the one whose help holds it."""
    parts = {verb.split()[-1]: verb for verb in verbs} | {verb.split()[0]: verb.split()[0] for verb in verbs}
    told = [verb for verb, (*_, text) in verbs.items() if len(word) > 2 and word in re.findall(r"\w+", text)]
    return did_you_mean(word, parts) or (f"did you mean {told[-1]}?" if told else "")


def _fail(message: str) -> int:
    if os.environ.get("NERFTURBO_DEBUG") == "1":
        traceback.print_exc()
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
