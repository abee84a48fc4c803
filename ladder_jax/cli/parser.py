"""Argparse whose mistakes are one line."""

import argparse

from ladder_jax.errors import UserError, unknown


class Parser(argparse.ArgumentParser):
    """A misspelt option is named with its nearest match; positionals may go on after an option."""

    def parse_known_args(self, args=None, namespace=None):
        # First of all, so that a misspelt option is not reported as a missing one.
        known = [option for action in self._actions for option in action.option_strings]
        for word in args if self._subparsers is None else ():
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                raise unknown("option", name, [option for option in known if option.startswith("--")])
        namespace, rest = super().parse_known_args(args, namespace)
        # Argparse ends a list of positionals at the first option; a user may go on after it.
        for action in self._actions:
            if action.nargs == "*" and not action.option_strings:
                more = [word for word in rest if not word.startswith("-")]
                setattr(namespace, action.dest, [*getattr(namespace, action.dest), *more])
                rest = [word for word in rest if word not in more]
        return namespace, rest

    def error(self, message: str):
        raise UserError(f"{message} (see {self.prog} --help)")
