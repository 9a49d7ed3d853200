"""Clients that close only their sending side after a request, as `nc -N` does: they get their answer.

Owns how such a client is told from one that has left: to the system both look the same until it is written to.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11

from edgelm.server.protocol import LimitedProtocol
from edgelm.server.sse import NDJSON, STREAMS_EVENTS

PROBES_S = (0.25, 0.25, 1.5, 6.0, 24.0)  # between the writes that find out; some clients take five interim responses
COMMENT = b":\n\n"  # of server-sent events
BLANK = b" "  # before the next line of JSON


class HalfCloseProtocol(LimitedProtocol):
    """The protocol of connections from clients. Engine processes do without: a front that closes has left."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._half_closed = False
        self._probe: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection open if a whole request has arrived and its answer has not gone out."""
        if not self._answering or self.cycle.more_body:
            return None
        if not self._half_closed:
            self._half_closed = True
            self._probe_after(0)
        return True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and not self._answering:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._probe is not None:
            self._probe.cancel()
        super().connection_lost(exc)

    def _probe_after(self, num_sent: int) -> None:
        if num_sent < len(PROBES_S):
            self._probe = self.loop.call_later(PROBES_S[num_sent], self._send_probe, num_sent)

    def _send_probe(self, num_sent: int) -> None:
        """Send `100 Continue`, or what clients skip between two events.

        The system of a client that has left answers with a reset. The next write then fails, and the request ends.
        """
        if not self._answering or self.transport.is_closing():
            return
        probe: h11.Event | None = None
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            probe = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        elif self.conn.our_state is h11.SEND_BODY and STREAMS_EVENTS in self.scope["state"]:
            probe = h11.Data(data=BLANK if self.scope["state"][STREAMS_EVENTS] == NDJSON else COMMENT)
        if probe is not None and (output := self.conn.send(probe)) is not None:
            self.transport.write(output)
        self._probe_after(num_sent + 1)
