"""`lockfast completion`: shell completion of commands, options and lock names.

Lock names come from strangers, and a shell expands `$(...)` in many places. The scripts therefore treat names only as
data: bash reads them into a variable and quotes them with `printf %q`; zsh and fish quote what they insert.
"""

from __future__ import annotations

import argparse
import shlex

from lockfast.cli.main import COMMANDS, RUN, load
from lockfast.cli.run_options import FLAGS, VALUES

SHELLS = ("bash", "zsh", "fish")
NAMED = ("run", "show", "force-release", "ls")  # commands whose first argument is a lock name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a script that completes commands, options and lock names in your shell."
    parser.epilog = (
        'examples:\n  $ eval "$(lockfast completion bash)"      # in ~/.bashrc\n'
        '  $ eval "$(lockfast completion zsh)"       # in ~/.zshrc\n'
        "  $ lockfast completion fish > ~/.config/fish/completions/lockfast.fish"
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](), end="")
    return 0


def options_of(command: str) -> list[str]:
    if command == RUN:
        return sorted(word for word in (*FLAGS, *VALUES) if word.startswith("--"))
    parser = argparse.ArgumentParser(prog=command)
    load(command).add_arguments(parser)
    return sorted(option for action in parser._actions for option in action.option_strings if option.startswith("--"))


def bash() -> str:
    cases = "\n".join(f'    {name}) options="{" ".join(options_of(name))}" ;;' for name in COMMANDS)
    return f"""\
_lockfast() {{
  # From the line, not from COMP_WORDS, which bash also splits at the colons of a name.
  local line="${{COMP_LINE:0:COMP_POINT}}" command="${{COMP_WORDS[1]}}" options="" word="" name
  local -a words
  read -ra words <<< "$line"
  [[ "$line" == *[[:space:]] ]] || word="${{words[-1]}}"
  local before="${{#words[@]}}" typed="${{word##*:}}"
  [ -z "$word" ] || before=$((before - 1))
  COMPREPLY=()
  if [ "$before" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)}" -- "$word"))
    return
  fi
  case "$command" in
{cases}
  esac
  case "$command:$word" in
    *:-*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    completion:*) COMPREPLY=($(compgen -W "{" ".join(SHELLS)}" -- "$word")) ;;
    {"|".join(f"{name}:*" for name in NAMED)})
      if [ "$before" -eq 2 ]; then
        while IFS= read -r name; do
          [[ "$name" == "$word"* ]] || continue
          printf -v name %q "$name"
          COMPREPLY+=("${{name#"${{word%"$typed"}}"}}")  # bash replaces only what follows the last colon
        done < <(lockfast ls --names 2>/dev/null)
      else
        COMPREPLY=($(compgen -c -- "$word"))
      fi ;;
  esac
}}
complete -o default -F _lockfast lockfast
"""


def zsh() -> str:
    commands = " ".join(shlex.quote(f"{name}:{COMMANDS[name][1]}") for name in COMMANDS)
    cases = "\n".join(f"    {name}) options=({' '.join(options_of(name))}) ;;" for name in COMMANDS)
    return f"""\
_lockfast() {{
  local -a commands options
  commands=({commands})
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case "$words[2]" in
{cases}
  esac
  if [[ "$words[CURRENT]" == -* ]]; then
    compadd -- $options
  elif [[ "$words[2]" == completion ]]; then
    compadd {" ".join(SHELLS)}
  elif (( CURRENT == 3 )); then
    compadd -- ${{(f)"$(lockfast ls --names 2>/dev/null)"}}
  else
    _normal -p lockfast
  fi
}}
compdef _lockfast lockfast
"""


def fish() -> str:
    lines = ["complete -c lockfast -f"]
    for name, (_, summary, _) in COMMANDS.items():
        described = summary.replace("'", "\\'")
        lines.append(f"complete -c lockfast -n __fish_use_subcommand -a {name} -d '{described}'")
        lines += [
            f"complete -c lockfast -n '__fish_seen_subcommand_from {name}' -l {option.removeprefix('--')}"
            for option in options_of(name)
        ]
    lines += [
        f"complete -c lockfast -n '__fish_seen_subcommand_from {name}' -a '(lockfast ls --names 2>/dev/null)'"
        for name in NAMED
    ]
    lines.append(f"complete -c lockfast -n '__fish_seen_subcommand_from completion' -a '{' '.join(SHELLS)}'")
    return "\n".join(lines) + "\n"
