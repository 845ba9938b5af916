"""When an answer ends: stop ids, stop strings over token bytes, length caps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cbserve.core.request import FinishReason, Request, Sequence


class StopChecker:
    """Looks at each sampled token once and says whether its sequence ends.

    Args:
        eos_token_ids: ids that end an answer unless `ignore_eos`.
        token_bytes: bytes of a token (b"" for a special one). Without it there is no text and no stop string.
    """

    def __init__(
        self,
        eos_token_ids: Iterable[int] = (),
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self.token_bytes = token_bytes

    def refuses(self, request: Request) -> str | None:
        """Why nothing here could see the stop strings of `request`; None if it can, or there are none."""
        if request.params.stop and self.token_bytes is None:
            return (
                f"stop={request.params.stop!r}: stop strings need a tokenizer; use stop_token_ids, or an LLM and not a "
                "bare Engine"
            )
        return None

    def check(self, seq: Sequence) -> None:
        """Take the last token of `seq` into account; set `finish_reason`, `stop_reason` and `text_end` if it ends."""
        params, token = seq.request.params, seq.output_token_ids[-1]
        is_eos = token in self.eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            seq.finish_reason = FinishReason.STOP
            seq.stop_reason = None if is_eos else token
            return  # the token stays in the ids and is kept out of the text
        if self.token_bytes is not None:
            data = self.token_bytes(token)
            seq.output_bytes += data
            if params.stop and self._find_stop_string(seq, len(data)):
                return
        if seq.num_output_tokens >= seq.max_tokens:  # the model's and the pool's limit are in it
            seq.finish_reason = FinishReason.LENGTH

    def _find_stop_string(self, seq: Sequence, num_new_bytes: int) -> bool:
        """The stop string that completes first wins; of two that complete at the same byte, the longer."""
        best: tuple[int, int, str] | None = None
        for stop in seq.request.params.stop:
            needle = stop.encode()
            begin = max(0, len(seq.output_bytes) - num_new_bytes - len(needle) + 1)
            at = seq.output_bytes.find(needle, begin)
            if at >= 0 and (best is None or (at + len(needle), at) < best[:2]):
                best = (at + len(needle), at, stop)
        if best is None:
            return False
        seq.finish_reason, seq.stop_reason, seq.text_end = FinishReason.STOP, best[2], best[1]
        return True


def visible_text(seq: Sequence, num_sent: int) -> tuple[str, int]:
    """The text of `seq` that may be shown now, from byte `num_sent` on, and the new `num_sent`.

    While it runs, bytes that may yet be cut by a stop string, or that end within a UTF-8 character, are held back.
    """
    if len(seq.output_bytes) == num_sent:
        return "", num_sent
    if seq.is_finished:
        data = bytes(seq.output_bytes[num_sent : seq.text_end])
        return data.decode(errors="replace"), num_sent + len(data)
    longest = max((len(s.encode()) for s in seq.request.params.stop), default=1)
    end = len(seq.output_bytes) - (longest - 1)
    while end > num_sent and end < len(seq.output_bytes) and (seq.output_bytes[end] & 0xC0) == 0x80:
        end -= 1  # do not cut within a character that is complete
    end = _last_whole_character(seq.output_bytes, num_sent, end)
    if end <= num_sent:
        return "", num_sent
    return bytes(seq.output_bytes[num_sent:end]).decode(errors="replace"), end


def _last_whole_character(data: bytearray, start: int, end: int) -> int:
    """The largest index <= end such that data[start:index] does not end within an unfinished UTF-8 character."""
    for back in range(1, min(4, end - start) + 1):
        byte = data[end - back]
        if byte & 0xC0 == 0x80:
            continue  # a continuation byte: look for its lead
        size = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return end if size <= back else end - back
    return end
