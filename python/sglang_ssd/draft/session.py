"""One request on the draft's side: its main path, its speculation cache, and the answer it owes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_ssd.algorithm.fan_out import Allocator, FanOutQuery
from sglang_ssd.algorithm.lookahead import Size
from sglang_ssd.algorithm.ngram import LazyNGramIndex
from sglang_ssd.algorithm.outcome import Outcome
from sglang_ssd.draft.forking_paths import ForkingPaths, Guess, Path
from sglang_ssd.draft.runner import DraftLaw
from sglang_ssd.draft.speculation_cache import SpeculationCache
from sglang_ssd.wire.messages import RowKey, Source


class Due(NamedTuple):
    """An answer that is owed: the row of a ticket, and what its source will be called."""

    ticket: int
    row: int
    source: Source


class Session:
    """Life: open (prompt pending) -> prefilled -> [outcome -> complete the proposal -> answer -> fork]* -> close.

    ``main.drafted`` is at once the proposal in the making and, after the answer, the proposal under verification.
    """

    def __init__(
        self,
        key: RowKey,
        token_ids: Sequence[int],
        main: Path,
        law: DraftLaw,
        size: Size,
        num_candidates: int,
        paths: ForkingPaths,
        allocate: Allocator,
    ) -> None:
        self.key = key
        self.main = main
        self.law = law
        self.lookahead, self.budget = size
        #: Ranks kept of each position. Forks can need the drafted token and all of the budget at one position.
        self.num_candidates = num_candidates
        self.cache = SpeculationCache()
        self.due: Due | None = None
        self._paths = paths
        self.source: Source = "none"
        self._tokens = list(token_ids)
        self._ngrams = LazyNGramIndex()
        #: What the n-gram backup would have proposed in place of the proposal under verification.
        self.ngram_instead: list[int] = []
        self._allocate = allocate
        self._forked: set[int] = set()
        self._is_prefilled = False

    # -- where it stands -----------------------------------------------------------------------------------------

    @property
    def after_hit(self) -> bool:
        """Whether the proposal under verification came from the cache."""
        return self.source == "hit"

    @property
    def needs_prefill(self) -> bool:
        return not self._is_prefilled

    @property
    def needs_answer(self) -> bool:
        """An answer is owed and the proposal is not complete."""
        return self.due is not None and self._is_prefilled and len(self.main.drafted) < self.lookahead

    @property
    def can_answer(self) -> bool:
        """An answer is owed and the proposal is complete."""
        return self.due is not None and self._is_prefilled and len(self.main.drafted) >= self.lookahead

    def bonus_rank(self, outcome: Outcome) -> int | None:
        """The bonus token's place among the candidates of its position, from 0; None where there were none yet."""
        candidates = self._candidates(outcome.num_accepted)
        if candidates is None:
            return None
        return candidates.index(outcome.bonus_token) if outcome.bonus_token in candidates else len(candidates)

    def _candidates(self, position: int) -> list[int] | None:
        """Bonus tokens that the outcome can have at this position, likeliest first. At k < length the drafted token was
        rejected, so it cannot be the bonus."""
        if position >= len(self.main.ranks):
            return None
        ranks = self.main.ranks[position]
        rejected = self.main.drafted[position] if position < len(self.main.drafted) else None
        return [token for token in ranks if token != rejected]

    @property
    def is_cache_complete(self) -> bool:
        """Every branch has its K tokens."""
        return all(len(branch.drafted) >= self.lookahead for branch in self.cache.branches())

    def drafts_up_to(self, path: Path) -> int:
        """Tokens that this path may hold. A proposal that is out, short or not, must not grow: the verifier would not
        know of the rest."""
        return len(path.drafted) if path is self.main and self.due is None else self.lookahead

    def fork_lanes(self) -> list[Path]:
        """Paths whose next token is worth a forward while the outcome is unknown: the main path, once, for the
        candidates after its last token; and all branches that are not complete."""
        if self.due is not None or not self._is_prefilled or not self.budget:
            return []
        lanes = [branch for branch in self.cache.branches() if len(branch.drafted) < self.lookahead]
        if len(self.main.ranks) <= len(self.main.drafted):
            lanes.insert(0, self.main)
        return lanes

    def applies(self, key: RowKey, outcome: Outcome, committed_len: int) -> bool:
        """Whether this outcome continues what the session holds."""
        return (
            self.key == key
            and 0 <= outcome.num_accepted <= len(self.main.drafted)
            and self.main.length + outcome.num_accepted + 1 == committed_len
        )

    def fan_out_at(self, depth: int) -> int:
        """Guesses that will be prepared at this depth of a whole proposal: the F of Saguaro sampling."""
        return self._allocate(FanOutQuery(self.lookahead, self.budget, self.after_hit))[depth]

    # -- what happens to it --------------------------------------------------------------------------------------

    def take_prefill(self, guess: Guess, num_tokens: int) -> None:
        """A chunk of the prompt was forwarded. ``guess``: what the draft thinks of the token after it."""
        del self.main.pending[:num_tokens]
        self.main.num_cached += num_tokens
        if self.main.pending:
            return
        self._is_prefilled = True
        # The prompt counts as a proposal of length 0, whose outcome is the first token. If that token came while the
        # prompt was forwarded, it is part of it, and this guess is already the first draft.
        self.main.ranks = [guess.ranks]
        if self.due is not None:
            self.main.draft(guess)

    def take_outcome(self, outcome: Outcome, due: Due, size: Size) -> bool:
        """The verifier's outcome arrived. True when a branch stood for it; ``due.source`` is set accordingly. ``size``: of
        the next proposal and its branches."""
        self.lookahead, self.budget = size
        self._tokens += self.committed(outcome)
        self.ngram_instead = []
        if not self._is_prefilled:
            self.main.pending.append(outcome.bonus_token)
            self.main.length += 1
            self.due = due._replace(source="neural")
            return False
        winner = self.cache.take(outcome)
        self.drop_branches()
        if winner is not None:
            self._paths.adopt(self.main, winner)
        else:
            self._paths.rewind(self.main, *outcome)
        self.due = due._replace(source="hit" if winner else "neural")
        return winner is not None

    def committed(self, outcome: Outcome) -> list[int]:
        """The tokens that this outcome commits."""
        return [*self.main.drafted[: outcome.num_accepted], outcome.bonus_token]

    def ngram_proposal(self) -> list[int]:
        """K tokens after the longest earlier occurrence of the latest ones, [] where there is none."""
        return self._ngrams.propose(self._tokens, self.lookahead)

    def answer_by_ngram(self, token_ids: list[int]) -> None:
        """Let these tokens be the answer that is owed."""
        self.main.propose(token_ids)
        self.due = self.due._replace(source="ngram")

    def fork(self) -> tuple[int, int]:
        """Open branches for the positions whose candidates are known by now. Returns (opened, denied)."""
        main, num_opened, num_denied = self.main, 0, 0
        length = len(main.drafted)
        counts = self._allocate(FanOutQuery(length, self.budget, self.after_hit))
        for position in range(len(main.ranks)):
            if position in self._forked:
                continue
            self._forked.add(position)
            for token in self._candidates(position)[: counts[position]]:
                branch = self._paths.fork(main, position, token)
                if branch is None:
                    num_denied += 1
                    continue
                self.cache.put(Outcome(position, token), branch)
                num_opened += 1
        return num_opened, num_denied

    def answered(self) -> None:
        self.source = self.due.source
        self.due = None
        self._forked.clear()

    def drop_branches(self) -> int:
        """Release every branch. Returns how many."""
        dropped = self.cache.clear()
        self._paths.release(*dropped)
        return len(dropped)

    def close(self) -> None:
        self.drop_branches()
        self._paths.close(self.main, self._tokens)
