"""`nerfturbo --install-completion [bash | zsh | fish]`: the words of every command, read from its own help, written to
where the shell looks for completions. tyro completes one command; here verbs are found before tyro is imported."""

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ..errors import refuse

# {cases} says by what stands before the cursor, in `line`, which words may come, in `found`; flags after a dash only.
BASH = """_nerfturbo() {{
  local line="${{COMP_WORDS[*]:1:COMP_CWORD-1}}" word="${{COMP_WORDS[COMP_CWORD]}}" found
{cases}
  COMPREPLY=($(compgen -W "$found" -X "$([[ $word == -* ]] || echo '-*')" -- "$word"))
}}
complete -o default -F _nerfturbo nerfturbo
"""
ZSH = """#compdef nerfturbo
local line="${{words[2,CURRENT-1]}}" found
{cases}
[[ $PREFIX == -* ]] && compadd -- ${{=found}} || compadd -F '(-*)' -- ${{=found}} || _files
"""
FISH = """function __nerfturbo_words
  set -l line (commandline -opc)
{cases}
end
complete -c nerfturbo -a "(__nerfturbo_words)"
"""
CASE = '  case "$line" in', '    "{0}"{1}) found="{2}" ;;', "  esac"
SWITCH = '  switch "$line[2..-1]"', "    case '{0}{1}'\n      string split ' ' -- '{2}'", "  end"
SHELLS = {  # script; a variable that names a folder, or one in the home folder; file below it; what is left to do
    "bash": (BASH, "XDG_DATA_HOME", ".local/share", "bash-completion/completions/nerfturbo", "needs bash-completion"),
    "zsh": (ZSH, "", "", ".zfunc/_nerfturbo", "add `fpath+=~/.zfunc; autoload -Uz compinit; compinit` to ~/.zshrc"),
    "fish": (FISH, "XDG_CONFIG_HOME", ".config", "fish/completions/nerfturbo.fish", "active in new shells"),
}


def install(arguments: list[str], verbs: Iterable[str], run: Callable[[str, list[str]], int]) -> int:
    """Write the script of the named shell, or of the one that runs; `run(verb, ["--help"])` prints a verb's help."""
    shell = arguments[0] if arguments else Path(os.environ.get("SHELL", "")).name
    bad, got = shell not in SHELLS or len(arguments) > 1, repr(" ".join(arguments) or shell)
    refuse(bad, "--install-completion", f"one of {', '.join(SHELLS)}", got, "name the shell after the flag")
    script, variable, folder, file, left = SHELLS[shell]
    os.environ["COLUMNS"] = "1000"  # a narrow help breaks long flags
    words = {verb: {*_flags(verb, run), "--help"} for verb in verbs}
    for verb in verbs:
        first, _, second = verb.partition(" ")
        words[""] = {*words.get("", set()), first, "--help", "--version"}
        words |= {first: {*words.get(first, set()), second, "--help"}} if second else {}
    head, each, end = SWITCH if shell == "fish" else CASE
    rows = [each.format(verb, "*" if verb else "", " ".join(sorted(words[verb]))) for verb in sorted(words)[::-1]]
    path = Path(os.environ.get(variable) or Path.home() / folder) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script.format(cases="\n".join([head, *rows, end])), encoding="utf-8")
    print(f"wrote {path}; {left}")
    return 0


def _flags(verb: str, run: Callable[[str, list[str]], int], how: str = "--help") -> set[str]:
    """The flags that a command's whole help names."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        run(verb, [how])
    found = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text.getvalue()))
    return found | _flags(verb, run, "--help-all") if how == "--help" and "--help-all" in found else found
