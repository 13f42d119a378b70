"""`nerfturbo --install-completion` writes what the shell then completes."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from nerfturbo.cli import completion
from nerfturbo.cli.main import VERBS, main

FLAGS = {"train": ["--steps", "--train.batch-samples"], "export mesh": ["--faces"], "scene info": ["--json"]}
FILES = {
    "bash": ".local/share/bash-completion/completions/nerfturbo",
    "zsh": ".zfunc/_nerfturbo",
    "fish": ".config/fish/completions/nerfturbo.fish",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def show_help(verb: str, rest: list[str]) -> int:
    """Stands for the commands: prints their flags and leaves, as tyro does."""
    print("usage: [-h] [--help] " + " ".join(f"[{flag} X]" for flag in FLAGS.get(verb, [])))
    raise SystemExit(0)


def complete(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in ("nerfturbo", *words))
    code = f"source '{script}'; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _nerfturbo; echo ${{COMPREPLY[@]}}"
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_subcommands_and_flags(home: Path, capsys) -> None:
    assert completion.install(["bash"], VERBS, show_help) == 0
    script = home / FILES["bash"]
    assert str(script) in capsys.readouterr().out
    assert complete(script, "tr") == ["train"]
    assert set(complete(script, "")) >= {verb.split()[0] for verb in VERBS}
    assert complete(script, "export", "m") == ["mesh"]
    assert complete(script, "export", "mesh", "--fa") == ["--faces"]
    assert complete(script, "train", "scene", "--train.b") == ["--train.batch-samples"]
    for word in ("fox", ""):
        assert complete(script, "train", word) == []  # and then, by -o default, files
    assert set(complete(script, "train", "-")) >= set(FLAGS["train"])


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_the_same_words(home: Path, shell: str) -> None:
    assert completion.install([shell], VERBS, show_help) == 0
    text = (home / FILES[shell]).read_text()
    assert all(
        word in text
        for word in ("export mesh", "--faces", "cameras grid mesh nerfstudio onnx points splats web", "batch bench")
    )


TYPED = {
    "tr": "train",
    "export m": "export mesh",
    "export mesh --fa": "export mesh --faces",
    "train scene --train.b": "train scene --train.batch-samples",
    "train pho": "train photos/",
}


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completion.install(["fish"], VERBS, show_help)
    (home / "photos").mkdir()
    (home / "nerfturbo").touch(mode=0o755)  # fish completes only commands that are there
    monkeypatch.setenv("PATH", str(home), prepend=":")
    for typed, line in TYPED.items():
        command = ["fish", "-c", f"complete -C 'nerfturbo {typed}'"]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True)
        assert done.stdout.split() == line.split()[-1:], (typed, done)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(home: Path) -> None:
    """Typed into a terminal, for zsh completes nowhere else; the command says what it was given."""
    completion.install(["zsh"], VERBS, show_help)
    (home / "photos").mkdir()
    start = "fpath+=~/.zfunc; autoload -Uz compinit; compinit -u"  # as the command says; -u: asks nothing
    (home / ".zshrc").write_text(start + '; nerfturbo() { print -r -- "given($*)" }; PS1=ready:\n')
    typed = TYPED | {"train ": "train photos/"}  # after a space come files, and no flags
    pending = [*(f"nerfturbo {line}\t\n" for line in typed), "exit\n"]
    screen, keyboard = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "ZDOTDIR": str(home)}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), keyboard)
    shell = subprocess.Popen(["zsh", "-i"], cwd=home, env=environment, start_new_session=True, **streams)
    said, seen, until = "", 0, time.monotonic() + 60.0
    while (shell.poll() is None and time.monotonic() < until) or select.select([screen], [], [], 0.0)[0]:
        said += os.read(screen, 4096).decode() if select.select([screen], [], [], 0.1)[0] else ""
        if pending and said.find("ready:", seen) >= 0:
            seen = len(said)
            os.write(screen, pending.pop(0).encode())
    shell.kill()
    assert re.findall(r"given\((.*?)\)", said) == [line.rstrip("/") for line in typed.values()], said


def test_bash_is_said_to_need_the_package_that_looks_there(home: Path, capsys) -> None:
    assert completion.install(["bash"], VERBS, show_help) == 0
    assert capsys.readouterr().out == f"wrote {home / FILES['bash']}; needs bash-completion\n"


def test_the_shell_that_runs_is_taken_and_its_folder_may_be_elsewhere(home: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "settings"))
    assert completion.install([], VERBS, show_help) == 0
    assert (home / "settings/fish/completions/nerfturbo.fish").is_file()


@pytest.mark.parametrize(("arguments", "word"), [(["tcsh"], "one of bash, zsh, fish"), (["bash", "zsh"], "'bash zsh'")])
def test_another_shell_is_an_error_that_names_those_there_are(home: Path, capsys, arguments, word: str) -> None:
    assert main(["--install-completion", *arguments]) == 2
    assert word in capsys.readouterr().err
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_the_words_are_those_of_the_commands(home: Path) -> None:
    assert main(["--install-completion", "bash"]) == 0
    script = home / FILES["bash"]
    assert complete(script, "train", "--train.batch-s") == ["--train.batch-samples"]
    for verb in VERBS:
        assert len(complete(script, *verb.split(), "--")) > 1, verb
