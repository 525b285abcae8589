"""Server-sent events, from bytes cut anywhere."""

__all__ = ["EventParser"]


class EventParser:
    """Feed it a stream's bytes as they come; it gives the data of each event that is complete.

    Lines may end in CR LF, LF or CR, and an event's data may take several lines, as the standard has it. Comments,
    and fields other than `data`, are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes."""
        text = self._rest + chunk
        # A CR at the very end may be the first half of CR LF: keep it until more is known.
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""
            text = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        lines = text.split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._data.append(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
