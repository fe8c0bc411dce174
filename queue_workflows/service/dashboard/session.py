"""Log in with a token, keep the session in a signed cookie, end it. INTERFACE."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from queue_workflows.service import tokens


class Session(NamedTuple):
    """Who looks at a page: scope of the token, name (actor of acts), chosen zone."""

    scope: tokens.Scope
    name: str
    zone: str

    def may(self, needs: tokens.Scope) -> bool:
        """Return whether the session has this scope."""
        return tokens.RANK[self.scope] >= tokens.RANK[needs]

    @property
    def sees_values(self) -> bool:
        """Return whether inputs, outputs, logs and errors may be shown: not with `look`."""
        return self.may("read")


def of(request: Request) -> Session:
    """Return the session of a request; every route but login and static files has one."""
    raise NotImplementedError
