"""What a page map says in words: finding, numbers, description, hover text and table, all computed from the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cbserve.core.pages import CACHED, USED, Page, PageState
from cbserve.viz.findings import Rows, joined, plural
from cbserve.viz.spans import letters, order_of_ids
from cbserve.viz.style import percent


def sequence_names(state: PageState, names: Mapping[str, str] | None = None) -> dict[int, str]:
    """seq_id -> what stands on its pages: the request's letter, and the number of the sample if there are several."""
    named = letters(order_of_ids(state.arrived), names)
    several = {request_id for request_id, sample in state.owners.values() if sample}
    return {
        seq_id: named[request_id] + (f".{sample}" if request_id in several else "")
        for seq_id, (request_id, sample) in state.owners.items()
    }


def empty_share(pages: Iterable[Page], block_size: int) -> float:
    """Share of the used pages' places that hold no token."""
    used = [page for page in pages if page.state == USED]
    return 1 - sum(page.num_tokens for page in used) / (len(used) * block_size) if used else float("nan")


def finding(state: PageState, pages: Sequence[Page], names: Mapping[int, str]) -> str:
    """The title: one sentence with the numbers of this step."""
    used = [page for page in pages if page.state == USED]
    if not used:
        cached = sum(page.state == CACHED for page in pages)
        return f"All {len(pages):,} pages are free" + (
            f"; the content of {cached:,} can still be found" if cached else ""
        )
    shared = [page for page in used if page.ref_count > 1]
    empty = percent(empty_share(pages, state.block_size))
    rest = f"{empty} of the used room is empty"
    if state.padding:
        kept = {block for seq_id in state.padding for block in state.tables[seq_id]}
        rest = f"{plural(len(kept), 'page')} kept by rows that are done, {rest}"
    if shared:
        groups = _sharing(shared)
        told = [f"{joined([names[s] for s in who], 4)} share {plural(count, 'page')}" for who, count in groups]
        several = f"{sum(len(who) for who, _ in groups)} sequences share {plural(len(shared), 'page')}"
        return f"{', '.join(told) if len(told) <= 2 else several}; {rest}"
    who = plural(len(state.tables), "request") + (" uses" if len(state.tables) == 1 else " use")
    what = f"all {len(pages):,} pages" if len(used) == len(pages) else f"{len(used):,} of {len(pages):,} pages"
    return f"{who} {what}; {rest}"


def _sharing(shared: Sequence[Page]) -> list[tuple[list[int], int]]:
    """(sequences, pages) of each group that shares pages, the one with the most pages first."""
    groups: list[tuple[set[int], int]] = []
    for page in shared:
        who, count = {seq_id for seq_id, _ in page.holders}, 1
        for group in [group for group in groups if group[0] & who]:
            groups.remove(group)
            who, count = who | group[0], count + group[1]
        groups.append((who, count))
    return [(sorted(who), count) for who, count in sorted(groups, key=lambda group: -group[1])]


def numbers(state: PageState, pages: Sequence[Page]) -> list[tuple[str, str]]:
    """(printed large, what it measures), the most important first."""
    used = [page for page in pages if page.state == USED]
    cached = sum(page.state == CACHED for page in pages)
    saved = sum(page.ref_count - 1 for page in used)
    host = sum(map(len, state.swapped.values()))
    found = [(f"{len(used):,} of {len(pages):,}", "pages used")]
    if used:
        found.append((percent(empty_share(pages, state.block_size)), "of the used room is empty"))
    for count, what in (
        (saved, "saved by sharing"),
        (cached, "free, content findable"),
        (host, "swapped out to the host"),
    ):
        if count:
            found.append((f"{count:,}", ("page " if count == 1 else "pages ") + what))
    return found


def hover(page: Page, state: PageState, names: Mapping[int, str], news: str = "") -> str:
    """Everything about one page."""
    if page.state == USED:
        held = joined([f"{names[s]} (entry {index})" for s, index in page.holders], 9)
        text = f"page {page.block}: held by {held}, {page.num_tokens} of {state.block_size} places filled"
    elif page.state == CACHED:
        who = names.get(page.holders[0][0])
        was = f"tokens of {who}" if who else "tokens of an earlier run"
        text = f"page {page.block}: free, but a prompt that begins alike still finds its content ({was})"
    else:
        text = f"page {page.block}: free"
    return f"{text}; {news}" if news else text


def describe(state: PageState, pages: Sequence[Page], names: Mapping[int, str], when: str) -> str:
    """What is drawn, for who cannot see it."""
    said = [f"Page map {when}, {len(pages):,} pages of {plural(state.block_size, 'token')}"]
    said += [f"{number} {what}" for number, what in numbers(state, pages)]
    tables = [
        f"{names[seq_id]} holds {joined([str(block) for block in table], 12)}"
        for seq_id, table in list(state.tables.items())[:12]
    ]
    more = [f"{len(state.tables) - 12} more requests hold pages"] if len(state.tables) > 12 else []
    return ": ".join([said[0], ", ".join(said[1:])]) + ". " + "".join(f"{text}. " for text in tables + more).strip()


def table_twin(state: PageState, pages: Sequence[Page], names: Mapping[int, str]) -> Rows:
    """A row for each sequence that holds pages, then the pages that are free."""
    header = ["request", "state", "tokens", "pages", "shared", "empty places", "block table"]
    refs = [page.ref_count for page in pages]
    rows: list[list[object]] = []
    for seq_id, table in state.tables.items():
        kind = "complete, keeps its pages" if seq_id in state.padding else "runs"
        kind = "comes in from the host" if seq_id in state.coming_in else kind
        tokens = state.num_tokens[seq_id]
        shared = sum(refs[block] > 1 for block in table)
        empty = len(table) * state.block_size - tokens
        rows.append([names[seq_id], kind, tokens, len(table), shared, empty, ", ".join(map(str, table))])
    for seq_id, host in state.swapped.items():
        tokens = state.num_tokens[seq_id]
        empty = len(host) * state.block_size - tokens
        rows.append([names[seq_id], "swapped out", tokens, len(host), 0, empty, f"host: {', '.join(map(str, host))}"])
    for kind, what in ((CACHED, "free, content findable"), ("free", "free")):
        blocks = [page.block for page in pages if page.state == kind]
        if blocks:
            rows.append(["-", what, None, len(blocks), None, None, _ranges(blocks)])
    return header, rows


def _ranges(blocks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0 to 2, 5"."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block - 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
