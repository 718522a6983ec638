"""``python logits_of_batches.py MODEL DTYPE LARGEST_BATCH [unpacked]``: forwards one request in many batches and widths, and
compares its logits to the bit. Prints what the check at start says and the batches where they differ, as JSON. In a process
of its own: SGLang's runtime is one record a process.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

from sglang_ssd.bridge.environment import use_cpu_engine

use_cpu_engine()

from sglang_ssd.bridge import cpu_layers  # noqa: E402
from sglang_ssd.bridge.bit_equality import check_bit_equality  # noqa: E402
from sglang_ssd.bridge.draft_runner import DraftModelRunner, DraftRunnerConfig  # noqa: E402
from sglang_ssd_kernel import ForkLayout  # noqa: E402

PROMPT_LEN, NUM_NEW = 71, 8
LOOKAHEADS = range(1, 8)


def tokens_of(request: int, count: int) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(request)).tolist()


class Batch:
    """Requests 0 .. size - 1 with their prompts forwarded in one batch. Request 0 is the same in all batches."""

    def __init__(self, model: DraftModelRunner, size: int, chunk_len: int = PROMPT_LEN * 4) -> None:
        self.model = model
        self.lens = [PROMPT_LEN, *(5 + 13 * i for i in range(1, size))]
        self.tokens = [tokens_of(request, n + NUM_NEW) for request, n in enumerate(self.lens)]
        self.rows = [model.take_row() for _ in range(size)]
        for row, n in zip(self.rows, self.lens):
            model.write_slots(row, 0, model.take_slots(n + NUM_NEW))
        start = 0
        while any(start < n for n in self.lens):
            going = [i for i, n in enumerate(self.lens) if start < n]
            chunks = [self.tokens[i][start : min(self.lens[i], start + chunk_len)] for i in going]
            self.model.extend([self.rows[i] for i in going], [start] * len(going), chunks)
            start += chunk_len

    def close(self) -> None:
        for row, n in zip(self.rows, self.lens):
            self.model.give_slots(row, 0, n + NUM_NEW)
            self.model.give_row(row)

    def decode(self) -> torch.Tensor:
        """One token a forward: logits of request 0, [NUM_NEW, V]."""
        logits = []
        for step in range(NUM_NEW):
            positions = [n + step for n in self.lens]
            tokens = [tokens[at] for tokens, at in zip(self.tokens, positions)]
            layout = ForkLayout.without_forks(self.rows, [at + 1 for at in positions])
            logits.append(self.model.decode(layout, tokens)[0].clone())
        return torch.stack(logits)

    def verify(self, width: int) -> torch.Tensor:
        """``width`` tokens a forward, as a verify of K = width - 1 does it, at whatever tokens come."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        logits = []
        for step in range(0, NUM_NEW - NUM_NEW % width, width):
            starts = [n + step for n in self.lens]
            positions = torch.tensor(starts)[:, None] + torch.arange(width)
            row_ids = torch.tensor(self.rows)[:, None].expand_as(positions)
            slots = self.model._tables[row_ids, positions].long().flatten()
            batch = self.model._forward_batch(
                ForwardMode.TARGET_VERIFY,
                token_ids=[
                    token for tokens, at in zip(self.tokens, starts) for token in tokens[at : at + width]
                ],
                rows=self.rows,
                seq_lens=torch.tensor(starts),
                seq_lens_cpu=torch.tensor(starts),
                plan_lens=torch.tensor(starts),
                plan_lens_cpu=torch.tensor(starts),
                slots=slots,
                positions=positions.flatten(),
                spec_info=SimpleNamespace(
                    draft_token_num=width, is_draft_input=lambda: False, is_verify_input=lambda: True
                ),
            )
            logits.append(self.model._forward(batch)[:width].clone())
        return torch.cat(logits)

    def fork(self) -> torch.Tensor:
        """All new tokens in one forward of decode rows that share a prefix, as the draft's forwards do."""
        row, lens = self.rows[0], [PROMPT_LEN + step + 1 for step in range(NUM_NEW)]
        layout = ForkLayout([NUM_NEW], [row], [row] * NUM_NEW, lens, lens)
        return self.model.decode(layout, self.tokens[0][PROMPT_LEN:]).clone()


def differing_batches(model: DraftModelRunner, largest_batch: int) -> list[str]:
    """Names of the forwards whose logits are not those of plain decoding alone."""
    batch = Batch(model, 1)
    alone = batch.decode()
    batch.close()
    differing = []

    def compare(name: str, logits: torch.Tensor) -> None:
        if not torch.equal(logits, alone[: len(logits)]):
            differing.append(name)

    batch = Batch(model, 3, chunk_len=17)
    compare("prompts in chunks", batch.decode())
    compare("forks", batch.fork())
    batch.close()
    for size in range(1, largest_batch + 1):
        batch = Batch(model, size)
        compare(f"decode of {size}", batch.decode())
        for lookahead in LOOKAHEADS:
            compare(f"K={lookahead} of {size}", batch.verify(lookahead + 1))
        batch.close()
    return differing


def main(model_path: str, dtype: str, largest_batch: str, packing: str = "packed") -> None:
    if packing == "unpacked":
        cpu_layers.pack_linears = lambda model: 0
    model = DraftModelRunner(
        DraftRunnerConfig(
            model_path, "cpu", dtype, attention_backend=None, max_rows=16, kv_tokens=4096, context_length=512
        )
    )
    found = check_bit_equality(model.runner)
    print(json.dumps({"check": found._asdict(), "differing": differing_batches(model, int(largest_batch))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
