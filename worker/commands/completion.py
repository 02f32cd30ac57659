"""`kp-worker completion`: shell code that completes commands, options and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from worker.commands.shared.console import Command


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the code for completion in a shell.

    \b
    bash  eval "$(kp-worker completion bash)"     in ~/.bashrc
    zsh   eval "$(kp-worker completion zsh)"      in ~/.zshrc, after compinit
    fish  kp-worker completion fish | source      in ~/.config/fish/config.fish
    """  # noqa: D301 click's mark for text that it must not wrap
    kind = get_completion_class(shell)
    if kind is None:
        raise AssertionError(f"this is a bug: click completes no {shell}")
    click.echo(kind(context.find_root().command, {}, "kp-worker", "_KP_WORKER_COMPLETE").source())
