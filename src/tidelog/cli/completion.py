"""`tidelog completion`: a script that completes commands and options in bash, zsh or fish.

The script is generated from the parsers, so it has every command. It starts no process while a person types; names of
topics are therefore not completed.
"""

from __future__ import annotations

import re
from argparse import Action, ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from tidelog.cli.command import Commands, add_command
from tidelog.cli.render import Screen

_LOAD_HINTS: Final = {
    "bash": 'eval "$(tidelog completion bash)"      # in ~/.bashrc',
    "zsh": 'eval "$(tidelog completion zsh)"       # in ~/.zshrc, after compinit',
    "fish": "tidelog completion fish | source      # in ~/.config/fish/config.fish",
}


class CommandNode(NamedTuple):
    """One command, or one group of commands, as a shell completes it."""

    path: str  # `/topic/read`; empty for `tidelog` itself
    subcommands: list[tuple[str, str]]  # names and summaries
    options: list[Action]
    words: list[str]  # that a positional argument can be

    @property
    def option_names(self) -> list[str]:
        return [name for action in self.options for name in action.option_strings if name.startswith("--")]


def walk(parser: ArgumentParser, path: str = "") -> Iterator[CommandNode]:
    """Yield every command of a command line, groups before their commands."""
    options = [action for action in parser._actions if action.option_strings]
    below = next((action for action in parser._actions if isinstance(action, _SubParsersAction)), None)
    positionals = [action for action in parser._actions if not action.option_strings and action is not below]
    words = [str(choice) for action in positionals for choice in action.choices or ()]
    words += [choice for each in getattr(parser, "positionals", None) or () for choice in each.choices]
    summaries = {} if below is None else {each.dest: each.help or "" for each in below._choices_actions}
    names = [] if below is None else list(below.choices)
    yield CommandNode(path, [(name, summaries.get(name, "")) for name in names], options, words)
    for name in names:
        assert below is not None, "it has names"
        yield from walk(below.choices[name], f"{path}/{name}")


def _takes_value(action: Action) -> bool:
    return action.nargs != 0


def _summary(text: str) -> str:
    """A text for a shell's list of choices: one line without characters that shells interpret."""
    return re.sub(r"[^\w ,.;()/=+-]", " ", text.partition("\n")[0]).strip()[:70]


# ── bash ──────────────────────────────────────────────────────────────────────────────────────────

_BASH: Final = """\
# Completion of tidelog for bash. Load it with: eval "$(tidelog completion bash)"
_tidelog() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" at="" words="" options="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$at/${{COMP_WORDS[i]}}" in
            {paths}) at="$at/${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$at" in
{tables}
    esac
    case "$at $prev" in
{values}
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
        return
    fi
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    if [[ "$at" == {groups} ]]; then return; fi
    compopt -o filenames 2>/dev/null
    local IFS=$'\\n'
    COMPREPLY+=($(compgen -f -- "$cur"))
}}
complete -F _tidelog tidelog
"""


def bash_script(nodes: list[CommandNode]) -> str:
    tables = [
        f'        "{node.path}") words="{" ".join([name for name, _ in node.subcommands] or node.words)}" '
        f'options="{" ".join(node.option_names)}" ;;'
        for node in nodes
    ]
    values = [
        f"        {'|'.join(_quoted(f'{node.path} {name}') for name in action.option_strings)}) "
        f'COMPREPLY=($(compgen -W "{" ".join(map(str, action.choices))}" -- "$cur")); return ;;'
        for node in nodes
        for action in node.options
        if action.choices
    ]
    groups = "|".join(f'"{node.path}"' for node in nodes if node.subcommands)
    return _BASH.format(
        paths="|".join(node.path for node in nodes if node.path),
        tables="\n".join(tables),
        values="\n".join(values),
        groups=f"@({groups})",
    )


def _quoted(text: str) -> str:
    return f'"{text}"'


# ── zsh ───────────────────────────────────────────────────────────────────────────────────────────

_ZSH: Final = """\
#compdef tidelog
# Completion of tidelog for zsh. Load it with: eval "$(tidelog completion zsh)", after compinit
_tidelog() {{
    local at="" i
    local -a names options
    for ((i = 2; i < CURRENT; i++)); do
        case "$at/${{words[i]}}" in
            {paths}) at="$at/${{words[i]}}" ;;
        esac
    done
    case "$at" in
{tables}
    esac
    case "$at ${{words[CURRENT-1]}}" in
{values}
    esac
    if [[ ${{words[CURRENT]}} == -* ]]; then
        _describe -o option options
        return
    fi
    (( $#names )) && _describe command names
    [[ "$at" == ({groups}) ]] || _files
}}
(( $+functions[compdef] )) && compdef _tidelog tidelog
"""


def zsh_script(nodes: list[CommandNode]) -> str:
    tables = []
    for node in nodes:
        names = [f"'{name}:{_summary(text)}'" for name, text in node.subcommands] or [
            f"'{name}'" for name in node.words
        ]
        options = [
            f"'{name}:{_summary(action.help or '')}'"
            for action in node.options
            for name in action.option_strings
            if name.startswith("--")
        ]
        tables.append(f"        ('{node.path}') names=({' '.join(names)}) options=({' '.join(options)}) ;;")
    values = [
        f"        ({'|'.join(_quoted(f'{node.path} {name}') for name in action.option_strings)}) "
        f"compadd -- {' '.join(map(str, action.choices))}; return ;;"
        for node in nodes
        for action in node.options
        if action.choices
    ]
    return _ZSH.format(
        paths="|".join(node.path for node in nodes if node.path),
        tables="\n".join(tables),
        values="\n".join(values),
        groups="|".join(node.path for node in nodes if node.subcommands),
    )


# ── fish ──────────────────────────────────────────────────────────────────────────────────────────

_FISH: Final = """\
# Completion of tidelog for fish. Load it with: tidelog completion fish | source
function __tidelog_at
    set -l at ""
    set -l tokens (commandline -opc)
    for word in $tokens[2..-1]
        switch "$at/$word"
            case {paths}
                set at "$at/$word"
        end
    end
    test "$at" = "$argv[1]"
end
complete -c tidelog -e
{lines}
"""


def fish_script(nodes: list[CommandNode]) -> str:
    lines = []
    for node in nodes:
        condition = f"complete -c tidelog -n \"__tidelog_at '{node.path}'\""
        if node.subcommands:
            lines.append(f"{condition} -f")
        lines += [f"{condition} -a {name} -d '{_summary(text)}'" for name, text in node.subcommands]
        lines += [f"{condition} -a {word}" for word in node.words]
        for action in node.options:
            for name in (name for name in action.option_strings if name.startswith("--")):
                value = " -r" if _takes_value(action) else ""
                if action.choices:
                    value = f" -x -a '{' '.join(map(str, action.choices))}'"
                lines.append(f"{condition} -l {name[2:]}{value} -d '{_summary(action.help or '')}'")
    return _FISH.format(paths=" ".join(f"'{node.path}'" for node in nodes if node.path), lines="\n".join(lines))


SCRIPTS: Final[dict[str, Callable[[list[CommandNode]], str]]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}


def print_script(args: Namespace, screen: Screen) -> int:
    """Print the script of a shell."""
    from tidelog.cli.main import build_parser  # which has this command too

    script = SCRIPTS[args.shell](list(walk(build_parser())))
    if screen.json:
        screen.print_result({"shell": args.shell, "script": script})
    else:
        screen.write_data(script.encode())
    return 0


def add(commands: Commands) -> None:
    """Add `completion` to the command line."""
    hints = "\n".join(f"  {line}" for line in _LOAD_HINTS.values())
    parser = add_command(
        commands,
        "completion",
        print_script,
        summary="complete commands and options in bash, zsh or fish",
        description=f"Print a script that lets a shell complete commands, options and their values. Load it:\n{hints}",
        examples="tidelog completion bash\ntidelog completion fish",
    )
    parser.add_argument("shell", choices=tuple(SCRIPTS))
