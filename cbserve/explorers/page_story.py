"""What happened to the pages in one step, and why, in sentences made from the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cbserve.core.pages import Change, PageState
from cbserve.viz.findings import joined, plural

MOST = 4  # sentences of one kind; the rest is counted


def tell_pages(state: PageState, names: Mapping[int, str]) -> str:
    """What this step took, shared, copied, swapped, gave back and lost; `names` are those of the figure."""
    swapped = {change.seq_id for change in state.changes if change.kind == "swapped_out"}
    told: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for change in state.changes:
        if change.kind == "freed" and change.seq_id in swapped:
            continue  # said with the swap
        kind = change.kind
        counts[kind] = counts.get(kind, 0) + len(change.blocks)
        if len(told.setdefault(kind, [])) < MOST:
            told[kind].append(_sentence(change, state, names.get(change.seq_id, "an earlier run")))
        else:
            told[kind] = told[kind][: MOST - 1] + [""]
    said: list[str] = []
    for kind, sentences in told.items():
        shown = [sentence for sentence in sentences if sentence]
        said += shown
        if len(shown) < len(sentences):
            said.append(f"In all {plural(counts[kind], 'page')} {ALL[kind]}.")
    if not said:
        said.append(_quiet(state))
    return " ".join(said)


ALL = {
    "allocated": "were taken", "hit": "were found in the prefix cache", "shared": "are shared by new samples",
    "copied": "were copied on write", "freed": "were given back", "swapped_out": "went to the host",
    "swapped_in": "came back from the host", "evicted": "lost their content to others",
}  # fmt: skip


def _sentence(change: Change, state: PageState, name: str) -> str:
    tokens, size, pages = state.num_tokens.get(change.seq_id, 0), state.block_size, _pages(change.blocks)
    if change.kind == "allocated":
        table = state.tables.get(change.seq_id, ())
        return f"{name} takes {pages}: {plural(tokens, 'token')} need {plural(len(table), 'page')} of {size}."
    if change.kind == "hit":
        return (
            f"{name} finds its first {plural(len(change.blocks) * size, 'token')} in {pages}: {change.reason}, so they "
            "are shared, not computed."
        )
    if change.kind == "shared":
        return f"{name} begins with {pages}, which its sibling holds: {change.reason}."
    if change.kind == "copied":
        return f"{name} gets {pages}, a copy of {_pages(change.sources)}: {change.reason}, so it is copied on write."
    if change.kind == "swapped_out":
        count = plural(len(change.sources), "page")
        return f"{name} is preempted: {change.reason}. The content of its {count} goes to the host."
    if change.kind == "swapped_in":
        return f"{name} comes back from the host into {pages}: {change.reason}."
    if change.kind == "evicted":
        return f"The content of {pages}, last held by {name}, is lost: {change.reason}."
    return f"{name} gives back {pages}: {change.reason}."


def _pages(blocks: Sequence[int]) -> str:
    return ("page " if len(blocks) == 1 else "pages ") + joined([str(block) for block in blocks])


def _quiet(state: PageState) -> str:
    if not state.tables:
        return "Nobody holds a page."
    return "No page changes hands: the last page of every request has room for its next token."


def tell_request(state: PageState, seq_ids: Iterable[int], names: Mapping[int, str]) -> str:
    """Where the chosen request's tokens are at this step."""
    said = []
    for seq_id in seq_ids:
        tokens, name = state.num_tokens.get(seq_id, 0), names[seq_id]
        if seq_id in state.tables:
            table = state.tables[seq_id]
            said.append(f"{name}: {plural(tokens, 'token')} in {_pages(table)}.")
        elif seq_id in state.swapped:
            count = plural(len(state.swapped[seq_id]), "page")
            said.append(f"{name} is swapped out: {plural(tokens, 'token')} in {count} of host memory.")
    return " ".join(said) or "none in this step."
