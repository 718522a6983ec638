"""The functions of ``sgl_kernel`` that SGLang 0.5.23 calls on a CPU, in torch.

Names, argument order and in-place results are those of SGLang's call sites; what each must do is defined by the
Triton kernel that stands next to the call site, named in each docstring relative to ``sglang/``. Tensors are on
the CPU; integer tensors may be int32 or int64 unless a dtype is given. ``bs`` is the number of requests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

TREE_MASK_FULL = 0  # SGLang's TreeMaskMode
TREE_MASK_QUERY_ONLY = 1

_UINT32_MASK = 0xFFFFFFFF


def not_implemented(name: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError with its own name when called."""

    def refuse(*args, **kwargs) -> NoReturn:
        raise NotImplementedError(
            f"{name} is not implemented by the CPU stand-in for sgl_kernel of sglang-ssd"
        )

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated KV slots into the rows of their requests, in place.

    ``req_to_token[req_pool_indices[i], start_offset[i]:end_offset[i]]`` receives the next ``end - start`` slots of
    ``out_cache_loc``. Twin: ``assign_req_to_token_pool`` in ``srt/mem_cache/allocation.py``.

    Args:
        req_pool_indices: ``[bs]``, a row of ``req_to_token`` for each request.
        req_to_token: ``[rows, pool_len]`` int32, written.
        start_offset, end_offset: ``[bs]``, half-open ranges of columns, ``0 <= start <= end <= pool_len``.
        out_cache_loc: at least ``sum(end - start)`` slots, request after request.
        pool_len: the row length.

    Raises:
        ValueError: a range outside of the row, or fewer slots than the ranges ask for.
    """
    table, slots = req_to_token.numpy(), out_cache_loc.numpy()
    for cells, packed in _ragged_ranges(req_pool_indices, start_offset, end_offset, pool_len, len(slots)):
        table[cells] = slots[packed]


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the KV slots of a range of each request, packed request after request, in place.

    The reverse of :func:`assign_req_to_token_pool_cpu`, with the same arguments and errors: here ``out_cache_loc``
    is written, its rest beyond ``sum(end - start)`` is left alone. Twin: ``assign_extend_cache_locs`` in
    ``kernels/ops/speculative/cache_locs.py``.
    """
    table, slots = req_to_token.numpy(), out_cache_loc.numpy()
    for cells, packed in _ragged_ranges(req_pool_indices, start_offset, end_offset, pool_len, len(slots)):
        slots[packed] = table[cells]


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Read the ``topk * speculative_num_steps`` KV slots that follow each request's tokens, in place.

    Twin: ``assign_draft_cache_locs_contiguous`` in ``kernels/ops/speculative/cache_locs.py``.

    Args:
        req_pool_indices: ``[bs]``, a row of ``req_to_token`` for each request.
        req_to_token: ``[rows, pool_len]``.
        seq_lens: ``[bs]``, the first column to read.
        out_cache_loc: at least ``bs * topk * speculative_num_steps`` slots, written.

    Raises:
        ValueError: the range leaves the row, or ``out_cache_loc`` is too short.
    """
    assign_extend_cache_locs_cpu(
        req_pool_indices,
        req_to_token,
        seq_lens,
        seq_lens + topk * speculative_num_steps,
        out_cache_loc,
        pool_len,
    )


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy KV slots ``src_loc`` to slots ``tgt_loc`` in every buffer, in place.

    All sources are read before any target is written, so the two may overlap. The buffers are known by address
    only: that the slots lie inside of them is the caller's promise. Twin: ``copy_all_layer_kv_cache_tiled`` in
    ``kernels/ops/kvcache/cache_move.py``.

    Args:
        data_ptrs: ``[buffers]`` uint64, addresses of the K and V buffers of all layers.
        strides: ``[buffers]``, bytes of one slot in each buffer.
        tgt_loc, src_loc: ``[n]`` slots; targets are distinct.

    Raises:
        ValueError: lengths of ``tgt_loc`` and ``src_loc`` differ, or a slot is negative.
    """
    if tgt_loc.shape != src_loc.shape:
        raise ValueError(f"tgt_loc has shape {tuple(tgt_loc.shape)} but src_loc {tuple(src_loc.shape)}")
    if tgt_loc.numel() == 0:
        return
    first_slot = min(int(tgt_loc.min()), int(src_loc.min()))
    if first_slot < 0:
        raise ValueError(f"tgt_loc and src_loc must not be negative, got {first_slot}")
    num_slots = max(int(tgt_loc.max()), int(src_loc.max())) + 1
    tgt_loc, src_loc = tgt_loc.long(), src_loc.long()
    for address, slot_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_slots * slot_bytes)).from_address(address)
        slots = torch.frombuffer(memory, dtype=torch.uint8).view(num_slots, slot_bytes)
        slots[tgt_loc] = slots[src_loc]


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Take each request's last accepted token, in place.

    Twin: ``fill_bonus_tokens`` in ``kernels/ops/speculative/eagle.py``.

    Args:
        accept_tokens: ``[bs, accept_stride]``, or flat.
        accept_lens: ``[bs]``, accepted tokens with the bonus, from 1 to ``accept_stride``.
        bonus_tokens: ``[bs]``, written.

    Raises:
        ValueError: a length outside of ``1..accept_stride``.
    """
    if accept_lens.numel() and not 1 <= int(accept_lens.min()) <= int(accept_lens.max()) <= accept_stride:
        raise ValueError(f"accept_lens must lie in 1..{accept_stride}, got {accept_lens.tolist()}")
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens - 1
    bonus_tokens[: accept_lens.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the KV slots of the accepted tokens to the front, in their order, in place.

    Twin: ``fill_accept_out_cache_loc`` in ``kernels/ops/speculative/eagle.py``.

    Args:
        accept_index: any shape, indices into ``out_cache_loc``, -1 where nothing was accepted.
        out_cache_loc: ``[n]`` slots.
        accept_out_cache_loc: written up to the number of accepted tokens.

    Raises:
        ValueError: ``accept_out_cache_loc`` is too short.
    """
    accepted = accept_index[accept_index > -1].long()
    if accept_out_cache_loc.numel() < accepted.numel():
        raise ValueError(
            f"accept_out_cache_loc holds {accept_out_cache_loc.numel()} slots but {accepted.numel()} were accepted"
        )
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """Shift each request's tokens one to the left and append its new token, in place.

    Twin: ``rotate_input_ids_kernel`` in ``kernels/ops/speculative/multi_layer_eagle.py``.

    Args:
        input_ids: ``[tokens]``, written.
        extend_start_loc, extend_seq_lens: ``[bs]``, each request's part of ``input_ids``; a part may be empty.
        topk_index: ``bs`` new tokens.
        select_index: ``[bs]``, where in ``input_ids`` the new token goes; None for the end of the part.
    """
    tokens = topk_index.reshape(-1)
    for i, (start, length) in enumerate(
        zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        if length == 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        input_ids[end - 1 if select_index is None else int(select_index[i])] = tokens[i]


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe each request's tree of drafted tokens: links, positions and attention mask, in place.

    Token 0 is the root (the last verified token), token i > 0 the i-th selected candidate. Twin:
    ``sgl_build_tree_kernel_efficient_triton`` in ``kernels/ops/speculative/spec_tree.py``.

    Args:
        parent_list: ``[bs, _]``, for each group of ``topk`` candidates the candidate that it continues; group 0
            continues the root.
        selected_index: ``[bs, draft_token_num - 1]``, the selected candidates in ascending order.
        verified_seq_len: ``[bs]``, tokens before the root.
        tree_mask: flat bool, written; ``[draft_token_num, seq_len + draft_token_num]`` for each request in mode 0
            (the part over the prefix is left alone), ``[draft_token_num, draft_token_num]`` in mode 1.
        positions: ``[bs * draft_token_num]``, written.
        retrieve_index: ``[bs, draft_token_num]``, written: the token's index in the batch.
        retrieve_next_token, retrieve_next_sibling: ``[bs, draft_token_num]``, -1 on entry, written: the first
            child, and the next token with the same parent.
        depth: the largest number of drafted tokens on a path.

    Raises:
        NotImplementedError: a bit-packed mask (mode 2).
    """
    if tree_mask_mode not in (TREE_MASK_FULL, TREE_MASK_QUERY_ONLY):
        raise NotImplementedError(
            f"build_tree_kernel_efficient_cpu: tree_mask_mode {int(tree_mask_mode)} is not implemented by the CPU "
            "stand-in for sgl_kernel of sglang-ssd"
        )
    n = draft_token_num
    mask_start = 0
    for request, seq_len in enumerate(verified_seq_len.tolist()):
        parents = _tree_parents(
            selected_index[request].tolist()[: n - 1], parent_list[request].tolist(), topk
        )
        first_token = request * n
        retrieve_index[request] = torch.arange(first_token, first_token + n)

        first_child: dict[int, int] = {}
        for token in range(n - 1, 0, -1):
            parent = parents[token]
            if parent is None:
                continue
            if parent in first_child:
                retrieve_next_sibling[request, token] = first_child[parent]
            first_child[parent] = token
        for parent, child in first_child.items():
            retrieve_next_token[request, parent] = child

        prefix = seq_len if tree_mask_mode == TREE_MASK_FULL else 0
        mask = tree_mask[mask_start : mask_start + n * (prefix + n)].view(n, prefix + n)[:, prefix:]
        mask_start += n * (prefix + n)
        mask.zero_()
        mask[:, 0] = True
        for token in range(n):
            path_length = 0
            ancestor: int | None = token
            while ancestor and path_length < depth:
                mask[token, ancestor] = True
                path_length += 1
                ancestor = parents[ancestor]
            positions[first_token + token] = seq_len + path_length


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the target's argmax down each request's tree as far as a drafted token agrees, in place.

    Twin: ``verify_tree_greedy_kernel_triton`` in ``kernels/ops/speculative/spec_tree.py``. SGLang spells the
    ``retrive_*`` keywords so.

    Args:
        predicts: ``[bs * n]``, written at the accepted tokens: the target's token after each.
        accept_index: ``[bs, steps]``, -1 on entry, written: batch indices of the root and the accepted tokens.
        accept_token_num: ``[bs]``, written: accepted drafted tokens, without the root.
        candidates: ``[bs, n]`` tokens, the root first.
        retrive_index, retrive_next_token, retrive_next_sibling: ``[bs, n]``, see
            :func:`build_tree_kernel_efficient_cpu`.
        target_predict: ``[bs, n]``, the target's argmax after each token.
    """
    target = target_predict.reshape(-1).tolist()
    rows = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    for request, (tokens, batch_index, first_child, sibling) in enumerate(rows):
        node = 0
        path = [batch_index[0]]
        while len(path) < accept_index.shape[1]:
            wanted = target[path[-1]]
            child = first_child[node]
            while child != -1 and tokens[child] != wanted:
                child = sibling[child]
            if child == -1:
                break
            node = child
            path.append(batch_index[node])
        accept_index[request, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        for index in path:
            predicts[index] = target[index]


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Hash of (seed, position, column) for every row and column: the noise of SGLang's seeded sampler.

    It is MurmurHash3 (x86, 32 bits, hash seed 0) of 16 bytes: ``seed`` as two little-endian words, low one first,
    then ``position`` and ``column``. Twin: ``murmur_hash32_kernel`` in ``kernels/ops/sampling/murmur_hash.py``.

    Args:
        seed: ``[n]`` uint64 or int64, 64 bits used.
        positions: ``[n]``, the low 32 bits used.
        col_indices: ``[m]`` for all rows or ``[n, m]``, the low 32 bits used.

    Returns:
        ``[n, m]`` uint32.
    """
    # int64 holds every intermediate: a product of two 32-bit words may wrap, which leaves its low 32 bits right.
    seed = seed.view(torch.int64)
    row = torch.zeros_like(seed)
    for word in (seed & _UINT32_MASK, (seed >> 32) & _UINT32_MASK, positions.long() & _UINT32_MASK):
        row = _mix_word(row, _scramble(word))
    hashed = _mix_word(row[:, None], _scramble(col_indices.long() & _UINT32_MASK))
    hashed ^= 16  # the length in bytes
    hashed ^= hashed >> 16
    hashed.mul_(0x85EBCA6B).bitwise_and_(_UINT32_MASK)
    hashed ^= hashed >> 13
    hashed.mul_(0xC2B2AE35).bitwise_and_(_UINT32_MASK)
    hashed ^= hashed >> 16
    return hashed.to(torch.uint32)


def _ragged_ranges(
    req_pool_indices: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    pool_len: int,
    num_slots: int,
) -> list[tuple[tuple[int, slice], slice]]:
    """``[start, end)`` of each request: its cells in the table, and where its slots lie among the packed ones.

    Python's own numbers: this runs every round on a handful of requests, where a call of a tensor library costs more
    than what it computes.
    """
    rows, starts, ends = (tensor.tolist() for tensor in (req_pool_indices, start_offset, end_offset))
    ranges: list[tuple[tuple[int, slice], slice]] = []
    num_packed = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        if not 0 <= start <= end <= pool_len:
            raise ValueError(
                f"start_offset {starts} and end_offset {ends} must be ranges within a row of {pool_len}"
            )
        ranges.append(((row, slice(start, end)), slice(num_packed, num_packed + end - start)))
        num_packed += end - start
    if num_slots < num_packed:
        raise ValueError(f"out_cache_loc holds {num_slots} slots but the ranges ask for {num_packed}")
    return ranges


def _tree_parents(selected: list[int], parent_list: list[int], topk: int) -> list[int | None]:
    """Parent token of every token; None for the root, and where the parent itself was not selected."""
    parents: list[int | None] = [None]
    for candidate in selected:
        group = candidate // topk
        if group == 0:
            parents.append(0)
        elif parent_list[group] in selected:
            parents.append(selected.index(parent_list[group]) + 1)
        else:
            parents.append(None)
    return parents


def _scramble(word: torch.Tensor) -> torch.Tensor:
    word = (word * 0xCC9E2D51) & _UINT32_MASK
    return (_rotate_left(word, 15) * 0x1B873593) & _UINT32_MASK


def _mix_word(hashed: torch.Tensor, scrambled: torch.Tensor) -> torch.Tensor:
    return _rotate_left(hashed ^ scrambled, 13).mul_(5).add_(0xE6546B64).bitwise_and_(_UINT32_MASK)


def _rotate_left(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) & _UINT32_MASK) | (word >> (32 - bits))
