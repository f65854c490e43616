"""Long random runs of the block pool and of the manager above it, against plain models of both."""

import random
from collections import Counter

from host_logic import make_manager, make_request
from mfs_trt.kv_cache.block_pool import Block, BlockPool


class PlainPool:
    """What a pool must do, by counting: no frames, no lists of free ones."""

    def __init__(self, num_frames: int) -> None:
        self.num_free = num_frames
        self.sizes: dict[int, int] = {}  # of blocks that hold frames, by number
        self.num_owners: Counter[int] = Counter()
        self.cached: dict[int, int] = {}  # key → block
        self.unused: list[int] = []  # keys without owner, unused for longest first
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        return self.num_free + sum(self.sizes[self.cached[key]] for key in self.unused)

    def allocate(self, number: int, size: int) -> None:
        while self.num_free < size:
            evicted = self.cached.pop(self.unused.pop(0))
            self.num_free += self.sizes.pop(evicted)
            self.num_evictions += 1
        self.num_free -= size
        self.sizes[number], self.num_owners[number] = size, 1

    def share(self, number: int, key: int) -> None:
        if key in self.unused:
            self.unused.remove(key)
        self.num_owners[number] += 1

    def release(self, number: int, key: int | None) -> None:
        self.num_owners[number] -= 1
        if self.num_owners[number]:
            return
        if key is None:
            self.num_free += self.sizes.pop(number)
        else:
            self.unused.append(key)


def test_row_32_eighty_thousand_random_operations_of_the_pool_agree_with_a_plain_model():
    """Row 32: an eviction breaks an invariant and kills the server."""
    rng = random.Random(0)
    pool, plain = BlockPool(1 + 40), PlainPool(40)
    held: list[tuple[int, Block]] = []  # an entry for each owner: number of the block, block
    content: dict[tuple[int, ...], int] = {}  # frames → number of the block that was written last
    keys: list[int | None] = []  # of every block, by its number
    for turn in range(80_000):
        action = rng.random()
        if action < 0.4:
            size = rng.choice((1, 1, 2, 3))
            assert (size <= pool.num_free_frames) == (size <= plain.num_available)
            if size <= pool.num_free_frames:
                block, number = pool.allocate(size), len(keys)
                plain.allocate(number, size)
                content[block.frames] = number
                key = rng.choice((None, number, number, max(0, number - 5)))
                if key is not None:
                    pool.register(block, key)
                    if key in plain.cached:  # the first block of a key stays its block
                        key = None
                    else:
                        plain.cached[key] = number
                keys.append(key)
                held.append((number, block))
        elif action < 0.75:
            if held:
                number, block = held.pop(rng.randrange(len(held)))
                pool.release(block)
                plain.release(number, keys[number])
        elif keys:
            key = rng.randrange(max(0, len(keys) - 60), len(keys))
            block = pool.find(key)
            assert (block is not None) == (key in plain.cached)
            if block is not None:
                number = plain.cached[key]
                assert content[block.frames] == number, "what was evicted was found"
                plain.share(number, key)
                held.append((number, pool.share(block)))
        assert pool.num_free_frames == plain.num_available
        assert pool.num_evictions == plain.num_evictions
        if turn % 500 == 0:
            pool.check_integrity([block for _, block in held])
    for number, block in held:
        pool.release(block)
        plain.release(number, keys[number])
    pool.check_integrity([])
    assert pool.num_free_frames == plain.num_available == 40
    assert pool.num_evictions > 1000


BLOCK, GROUPS = 4, (1, 1, 2)
TEXTS = [list(range(40)) for _ in range(7)]
for text, place in zip(TEXTS, (0, 3, 4, 15, 16, 30), strict=False):
    text[place] = 99  # each differs from the others in one token


class ManagerRun:
    """Requests that start, grow, change tier and end; remembers what each frame holds."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kv_cache = make_manager(
            1 + 48, groups=GROUPS, block_size=BLOCK, max_num_seqs=6, num_feature_slots=BLOCK * 9
        )
        self.open: list = []
        self.content: dict[tuple[int, ...], tuple] = {}  # frames → segment, salt, tokens
        self.count = self.num_found = 0

    def tokens_until(self, request, block: int) -> tuple:
        salt = request.prompt_request.cache_salt
        return salt, tuple(request.token_ids[: (block + 1) * BLOCK])

    def start(self) -> None:
        rng, text = self.rng, self.rng.choice(TEXTS)
        request = make_request(
            f"r{self.count}",
            prompt=text[: rng.randint(2, 40)],
            tier=rng.randrange(3),
            reuse_prefix=rng.random() < 0.9,
            cache_salt=rng.choice(("", "", "s")),
        )
        self.count += 1
        self.kv_cache.open(request)
        counts = request.num_computed_tokens
        assert counts == sorted(counts, reverse=True) and counts[0] < request.num_tokens
        self.check_found(request, 0)
        self.open.append(request)

    def check_found(self, request, first_segment: int) -> None:
        """Blocks from the cache hold just the tokens that they are to stand for."""
        held = self.kv_cache._held[request.request_id].blocks
        for segment in range(first_segment, len(held)):
            for i, block in enumerate(held[segment]):
                wanted = (segment, *self.tokens_until(request, i))
                assert self.content[block.frames] == wanted, (request, segment, i)
                self.num_found += 1

    def grow(self, request) -> None:
        """Every segment gets as far as the one below, or not quite."""
        counts, last = request.num_computed_tokens, []
        for count in counts:
            most = min([request.num_tokens, *last])
            last.append(max(count, min(most, count + self.rng.randint(0, 12))))
        before = self.kv_cache.pool.num_free_frames
        missing = self.kv_cache.missing_frames(request, last)
        if not self.kv_cache.allocate_slots(request, last):
            assert missing > before == self.kv_cache.pool.num_free_frames
            return
        if len(counts) < len(GROUPS) or last[-1] < last[0]:
            boundary = len(counts) - 1 if len(counts) < len(GROUPS) else 0
            above = last[boundary + 1] if boundary + 1 < len(last) else 0
            self.kv_cache.features.reserve(
                request, boundary, max(counts[boundary], above), last[boundary], above
            )
        request.num_computed_tokens = last
        held = self.kv_cache._held[request.request_id].blocks
        for segment, (first, end) in enumerate(zip(counts, last, strict=True)):
            for i in range(first // BLOCK, end // BLOCK):
                frames = held[segment][i].frames
                self.content[frames] = (segment, *self.tokens_until(request, i))
        self.kv_cache.commit(request)

    def move(self, request) -> None:
        """To another tier, as the scheduler does it."""
        before, tier = request.tier, self.rng.randrange(3)
        request.move_to(tier)
        if tier < before:
            self.kv_cache.cut(request, tier + 1)
        elif request.row >= 0:
            self.kv_cache.extend(request, before + 1)
            self.check_found(request, before + 1)
        self.kv_cache.features.rewind(request)

    def end(self, request) -> None:
        (self.kv_cache.forget if self.rng.random() < 0.8 else self.kv_cache.close)(request)
        self.open.remove(request)

    def turn(self) -> None:
        action = self.rng.random()
        if not self.open or (action < 0.2 and len(self.open) < 6):
            self.start()
            return
        request = self.rng.choice(self.open)
        act = self.grow if action < 0.8 else self.move if action < 0.86 else self.end
        act(request)
        missing = self.kv_cache.pool.num_usable_frames - self.kv_cache.pool.num_free_frames
        owned = {
            frame
            for held in self.kv_cache._held.values()
            for blocks in held.blocks
            for block in blocks
            for frame in block.frames
        }
        assert missing == len(owned)


def test_row_32_twenty_thousand_random_turns_of_the_manager_find_only_what_was_written():
    """Row 32: an eviction breaks an invariant and kills the server."""
    run = ManagerRun(seed=0)
    for turn in range(20_000):
        run.turn()
        if turn % 100 == 0:
            run.kv_cache.check_integrity()
    for request in run.open[:]:
        run.end(request)
    run.kv_cache.check_integrity()
    assert run.kv_cache.num_used_frames == 0
    assert run.kv_cache.pool.num_evictions > 1000 and run.num_found > 1000
