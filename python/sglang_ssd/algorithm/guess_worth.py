"""Whether guesses that no draft made are worth what it costs to verify them."""

from __future__ import annotations

#: Weight of the newest round in what is remembered, and rounds of either kind before it is believed.
NEWEST = 1 / 16
MIN_ROUNDS = 8
#: Guesses that were held back are tried again once in so many rounds: text and load change.
TRY_AGAIN_EVERY = 32


class GuessWorth:
    """Compares what guesses added lately with how much longer rounds with guesses took.

    A round of n rows emits n tokens without guesses. With m of them it emits ``m * added`` more and takes ``longer`` times
    as long, so it emits more a millisecond where ``m * added / n > longer - 1``. Each round with guesses is compared with
    those just before it: a machine's speed drifts by more than the difference.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """What was measured holds no longer."""
        self._added = _Recent()
        self._longer, self._narrow_ms = _Recent(), _Recent()
        self._num_held_back = 0

    def is_worth(self, num_guesses: int, num_rows: int) -> bool:
        """Whether a round of so many rows should verify so many guesses; always while too little is known."""
        if not self._longer.is_known:
            return True
        if num_guesses * self._added.mean > num_rows * (self._longer.mean - 1.0):
            return True
        self._num_held_back += 1
        return self._num_held_back % TRY_AGAIN_EVERY == 0

    def observe(self, num_guesses: int, num_added: int, round_ms: float) -> None:
        """A round verified so many guesses, of which so many tokens were accepted."""
        if not num_guesses:
            self._narrow_ms.observe(round_ms)
            return
        self._added.observe(num_added / num_guesses)
        if self._narrow_ms.is_known:
            self._longer.observe(round_ms / self._narrow_ms.mean)


class _Recent:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._num = 0

    @property
    def is_known(self) -> bool:
        return self._num >= MIN_ROUNDS

    def observe(self, value: float) -> None:
        self._num += 1
        self.mean += (value - self.mean) * max(NEWEST, 1 / self._num)
