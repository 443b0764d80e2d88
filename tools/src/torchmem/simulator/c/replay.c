/* Replays a program on the caching allocator; a compiled copy of the Python modules beside it.
 *
 * The Python modules are the reference, and functions have the names of theirs. What only they can
 * do is prepared there: the memory at the start, settings, limits. Here is what runs for each
 * instruction. tests/simulator/test_compiled.py compares the two. */

#include <setjmp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef int64_t i64;

enum { MALLOC, TRY_MALLOC, FREE, FREE_LATER, COMPLETE, EMPTY_CACHE, RELEASE_POOL, EMPTY_POOL };
/* Why `replay_run` returned. UNSUPPORTED: the Python modules would raise. NO_MEMORY: malloc failed,
 * and the replay can only be freed. */
enum { DONE, OOM, REJECTED, UNSUPPORTED, NO_MEMORY };

#define MIB (1ull << 20)
#define MIN_BLOCK_SIZE 512ull
#define SMALL_SIZE MIB
#define SMALL_BUFFER (2 * MIB)
#define MIN_LARGE_ALLOC (10 * MIB)
#define ROUND_LARGE (2 * MIB)
#define ALIGNMENT (2 * MIB)
#define NO_LIMIT UINT64_MAX
#define AWAITED_STREAM (-1)
#define MAX_ADDRESS (1ull << 48)
#define DIVISION_ENTRIES 16
#define PEAK_GROWTH 1.02

typedef struct Block Block;
typedef struct Stream Stream;
typedef struct Pool Pool;

/* The free blocks of a pool and a stream are a treap by size, age and address. */
struct Block {
    Block *left, *right;          /* in the treap */
    Block *prev, *next;           /* in the segment */
    Block *before, *behind;       /* in the queue of blocks that wait; `behind` also links unused ones */
    Pool *pool;
    i64 stream;
    u64 address, size, requested_size, registration_counter, gc_count_base, page_parts;
    u64 range, page;              /* of its expandable segment; page is 0 without one */
    uint32_t priority;
    int slots;                    /* how many slots refer to it; a dead block is kept for them */
    bool allocated, mapped, waits, is_dead, is_used;
};

struct Stream {
    i64 number;
    Block *root;
    Block **unmapped;             /* by address */
    size_t unmapped_count, unmapped_room;
    Stream *following;
};

struct Pool {
    Stream *streams, **end, *latest;   /* in the order of their first use */
    u64 get_free_blocks_call_count;
    int owner;                         /* the number of the private pool; 0 for the default pools */
    bool is_small;
};

typedef struct {
    u64 reserved, use_count;
    bool exists, is_freeable;
} PrivatePool;

/* As `_Settings` in compiled.py. */
typedef struct {
    u64 max_split_size, max_non_split_rounding_size, large_segment_size;
    u64 allowed, gc_threshold_bytes, rejection_bytes;   /* NO_LIMIT without one */
    u64 total_bytes, used_bytes, next_address, next_counter;
    i64 events, stranded_offset;
    i64 divisions[DIVISION_ENTRIES];
    int32_t expandable_segments, takes_best_fit, collects_garbage, order, samples, pools;
} Settings;

/* As `_Block` in compiled.py. Indexes are -1 for none. */
typedef struct {
    u64 address, size, requested_size, registration_counter, gc_count_base, page_parts, range, page;
    i64 stream, prev, next;
    int32_t pool, allocated, mapped, waits, is_free;
} BlockState;

/* Of a state that is no block, but a stream in the order of their first use. */
enum { ONLY_STREAM = 2 };

/* As `_Counts` in compiled.py. */
typedef struct {
    u64 peak_reserved, peak_allocated, retries, ooms, device_allocs, device_frees, syncs;
    u64 reserved, allocated, free_bytes, requested;
    i64 worst_stranded, worst_event, number;
} Counts;

typedef struct {
    i64 number, reserved, allocated, stranded;
} Point;

typedef struct {
    Settings settings;
    Counts counts;
    Pool *pools;                  /* small and large of each; the first two are the default pools */
    PrivatePool *private_pools;
    int *freeable;
    size_t freeable_count;
    Block **slots;
    Block *unused, *first_waiting, *last_waiting;
    void *chunks;
    uint32_t seed;
    u64 allocated[2], reserved[2], reserved_peak, allocated_peak;
    i64 inactive_split[2], stranded_offset, stranded;
    double sample_above;
    i64 sample_at;
    Point *points;
    size_t point_count, point_room;
    bool is_broken;
} Replay;

/* --- memory of this program --- */

enum { CHUNK = 1024 };
struct Chunk { void *following; Block blocks[CHUNK]; };

static void recycle(Replay *replay, Block *block)
{
    block->is_used = false;
    block->behind = replay->unused;
    replay->unused = block;
}

/* Where the functions that Python calls go on when memory runs out. */
static _Thread_local jmp_buf out_of_memory;

static void *checked(void *memory)
{
    if (!memory)
        longjmp(out_of_memory, 1);
    return memory;
}

static Block *new_block(Replay *replay)
{
    if (!replay->unused) {
        struct Chunk *chunk = checked(malloc(sizeof *chunk));
        chunk->following = replay->chunks;
        replay->chunks = chunk;
        for (int i = 0; i < CHUNK; i++) {
            recycle(replay, &chunk->blocks[i]);
        }
    }
    Block *block = replay->unused;
    replay->unused = block->behind;
    memset(block, 0, sizeof *block);
    replay->seed ^= replay->seed << 13;
    replay->seed ^= replay->seed >> 17;
    replay->seed ^= replay->seed << 5;
    block->priority = replay->seed;
    block->mapped = block->is_used = true;
    return block;
}

static void kill_block(Replay *replay, Block *block)
{
    block->is_dead = true;
    if (!block->slots)
        recycle(replay, block);
}

static void set_slot(Replay *replay, i64 slot, Block *block)
{
    Block *old = replay->slots[slot];
    replay->slots[slot] = block;
    if (block)
        block->slots++;
    if (old && !--old->slots && old->is_dead)
        recycle(replay, old);
}

static void *grown(void *array, size_t count, size_t *room, size_t size)
{
    if (count < *room)
        return array;
    size_t more = *room ? 2 * *room : 16;
    array = checked(realloc(array, more * size));
    *room = more;
    return array;
}

/* --- blocks.py --- */

static bool precedes(const Block *a, const Block *b)
{
    if (a->size != b->size)
        return a->size < b->size;
    if (a->registration_counter != b->registration_counter)
        return a->registration_counter < b->registration_counter;
    return a->address < b->address;
}

static void tree_insert(Block **root, Block *block)
{
    while (*root && (*root)->priority >= block->priority)
        root = precedes(block, *root) ? &(*root)->left : &(*root)->right;
    Block *rest = *root, **left = &block->left, **right = &block->right;
    *root = block;
    while (rest) {
        if (precedes(rest, block)) {
            *left = rest;
            left = &rest->right;
            rest = rest->right;
        } else {
            *right = rest;
            right = &rest->left;
            rest = rest->left;
        }
    }
    *left = *right = NULL;
}

static void tree_erase(Block **root, Block *block)
{
    while (*root != block)
        root = precedes(block, *root) ? &(*root)->left : &(*root)->right;
    Block *left = block->left, *right = block->right;
    while (left && right) {
        if (left->priority >= right->priority) {
            *root = left;
            root = &left->right;
            left = left->right;
        } else {
            *root = right;
            root = &right->left;
            right = right->left;
        }
    }
    *root = left ? left : right;
}

static Block *at_least(Block *root, u64 size)
{
    Block *found = NULL;
    while (root) {
        if (root->size >= size) {
            found = root;
            root = root->left;
        } else {
            root = root->right;
        }
    }
    return found;
}

static Block *following(Block *root, const Block *block)
{
    Block *found = NULL;
    while (root) {
        if (precedes(block, root)) {
            found = root;
            root = root->left;
        } else {
            root = root->right;
        }
    }
    return found;
}

static Stream *of_stream(Pool *pool, i64 number)
{
    if (pool->latest && pool->latest->number == number)
        return pool->latest;
    Stream *stream = pool->streams;
    while (stream && stream->number != number)
        stream = stream->following;
    if (!stream) {
        stream = checked(calloc(1, sizeof *stream));
        stream->number = number;
        *pool->end = stream;
        pool->end = &stream->following;
    }
    return pool->latest = stream;
}

static bool is_split(const Block *block)
{
    return block->prev || block->next;
}

static void splice(Block *block, Block *before, Block *after)
{
    block->prev = before;
    block->next = after;
    if (before)
        before->next = block;
    if (after)
        after->prev = block;
}

static u64 left_of(const Block *block, u64 address)
{
    return address - (address - block->range) % block->page;
}

static u64 right_of(const Block *block, u64 address)
{
    return left_of(block, address + block->page - 1);
}

static u64 page_parts(const Block *block)
{
    if (block->size < block->page)
        return block->size;
    u64 start = right_of(block, block->address) - block->address;
    return start + (block->size - start) % block->page;
}

static u64 next_counter(Replay *replay)
{
    return replay->settings.order == 0 ? 0 : replay->settings.next_counter++;
}

static Block *part_of(Replay *replay, const Block *block, u64 address, u64 size)
{
    Block *part = new_block(replay);
    part->stream = block->stream;
    part->pool = block->pool;
    part->address = address;
    part->size = size;
    part->range = block->range;
    part->page = block->page;
    part->registration_counter =
        replay->settings.order == 2 ? next_counter(replay) : block->registration_counter;
    return part;
}

static Block *split_head(Replay *replay, Block *remaining, u64 size)
{
    Block *head = part_of(replay, remaining, remaining->address, size);
    splice(head, remaining->prev, remaining);
    remaining->address += size;
    remaining->size -= size;
    return head;
}

static void insert_into_blocks(Replay *replay, Block *block)
{
    Pool *pool = block->pool;
    block->gc_count_base = pool->get_free_blocks_call_count;
    tree_insert(&of_stream(pool, block->stream)->root, block);
    if (block->page && !pool->owner) {
        block->page_parts = page_parts(block);
        replay->stranded_offset += (i64)block->page_parts;
    }
}

static void erase(Replay *replay, Block *block)
{
    tree_erase(&of_stream(block->pool, block->stream)->root, block);
    replay->stranded_offset -= (i64)block->page_parts;
}

static size_t unmapped_place(const Stream *stream, u64 address)
{
    size_t low = 0, high = stream->unmapped_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (stream->unmapped[middle]->address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void insert_unmapped(Block *block)
{
    Stream *stream = of_stream(block->pool, block->stream);
    stream->unmapped = grown(stream->unmapped, stream->unmapped_count, &stream->unmapped_room,
                             sizeof *stream->unmapped);
    size_t place = unmapped_place(stream, block->address);
    memmove(stream->unmapped + place + 1, stream->unmapped + place,
            (stream->unmapped_count++ - place) * sizeof *stream->unmapped);
    stream->unmapped[place] = block;
}

static void erase_unmapped(Block *block)
{
    Stream *stream = of_stream(block->pool, block->stream);
    size_t place = unmapped_place(stream, block->address);
    memmove(stream->unmapped + place, stream->unmapped + place + 1,
            (--stream->unmapped_count - place) * sizeof *stream->unmapped);
}

static u64 try_merge_blocks(Replay *replay, Block *into, Block *from)
{
    if (!from || from->allocated || from->waits || from->mapped != into->mapped)
        return 0;
    u64 size = from->size;
    if (from->mapped)
        erase(replay, from);
    else
        erase_unmapped(from);
    if (into->prev == from) {
        into->address = from->address;
        into->prev = from->prev;
        if (into->prev)
            into->prev->next = into;
    } else {
        into->next = from->next;
        if (into->next)
            into->next->prev = into;
    }
    into->size += size;
    kill_block(replay, from);
    return size;
}

static void inactive_split_changed(Replay *replay, Pool *pool, i64 size)
{
    replay->inactive_split[!pool->is_small] += size;
    if (pool->owner)
        replay->stranded_offset -= size;
}

static u64 expandable_size(const Block *block)
{
    const Block *next = block->next;
    return !next || next->mapped ? block->size : block->size + next->size;
}

static bool may_use(const Settings *settings, u64 block, u64 request)
{
    if (settings->max_split_size == NO_LIMIT)
        return true;
    if (request < settings->max_split_size)
        return block < settings->max_split_size;
    return block < request + settings->max_non_split_rounding_size;
}

static bool should_split(const Settings *settings, const Block *block, u64 size, bool is_expandable)
{
    u64 remaining = block->size - size;
    if (block->pool->is_small || is_expandable)
        return remaining >= MIN_BLOCK_SIZE;
    return remaining > SMALL_SIZE && size < settings->max_split_size;
}

/* --- stats.py --- */

static i64 stranded_bytes(const Replay *replay)
{
    return replay->inactive_split[0] + replay->inactive_split[1] + replay->stranded_offset;
}

static void add_allocated(Replay *replay, const Pool *pool, u64 size)
{
    u64 both = replay->allocated[0] + replay->allocated[1] + size;
    replay->allocated[!pool->is_small] += size;
    if (both > replay->allocated_peak)
        replay->allocated_peak = both;
}

static void add_reserved(Replay *replay, const Pool *pool, u64 size)
{
    u64 both = replay->reserved[0] + replay->reserved[1] + size;
    replay->reserved[!pool->is_small] += size;
    if (both > replay->reserved_peak)
        replay->reserved_peak = both;
    if (pool->owner)
        replay->private_pools[pool->owner].reserved += size;
}

static void subtract_reserved(Replay *replay, const Pool *pool, u64 size)
{
    replay->reserved[!pool->is_small] -= size;
    if (pool->owner)
        replay->private_pools[pool->owner].reserved -= size;
}

/* --- gpu.py --- */

static bool claim(Replay *replay, u64 size)
{
    Settings *settings = &replay->settings;
    if (size > settings->total_bytes || settings->used_bytes + size > settings->total_bytes)
        return false;
    settings->used_bytes += size;
    return true;
}

static u64 reserve_addresses(Replay *replay, u64 size)
{
    u64 address = replay->settings.next_address;
    replay->settings.next_address += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (replay->settings.next_address > MAX_ADDRESS)
        replay->is_broken = true;      /* the keys of the Python modules overlap from here on */
    return address;
}

/* --- events.py --- */

static void free_block(Replay *replay, Block *block);

static void insert_events(Replay *replay, Block *block)
{
    block->waits = true;
    block->behind = NULL;
    block->before = replay->last_waiting;
    if (block->before)
        block->before->behind = block;
    else
        replay->first_waiting = block;
    replay->last_waiting = block;
}

static void complete_event(Replay *replay, Block *block)
{
    if (block->before)
        block->before->behind = block->behind;
    else
        replay->first_waiting = block->behind;
    if (block->behind)
        block->behind->before = block->before;
    else
        replay->last_waiting = block->before;
    block->waits = false;
    free_block(replay, block);
}

static void complete_all(Replay *replay, int owner)
{
    Block *block = replay->first_waiting;
    while (block) {
        Block *behind = block->behind;
        if (!owner || block->pool->owner == owner)
            complete_event(replay, block);
        block = behind;
    }
}

/* --- device_memory.py and expandable_segments.py --- */

static bool map_block(Replay *replay, Block *block, u64 size)
{
    u64 mapped = right_of(block, block->address + size) - block->address;
    if (!claim(replay, mapped))
        return false;
    erase_unmapped(block);
    block->mapped = true;
    if (mapped < block->size) {
        Block *rest = part_of(replay, block, block->address + mapped, block->size - mapped);
        rest->mapped = false;
        splice(rest, block, block->next);
        insert_unmapped(rest);
        block->size = mapped;
    }
    try_merge_blocks(replay, block, block->prev);
    try_merge_blocks(replay, block, block->next);
    insert_into_blocks(replay, block);
    replay->counts.device_allocs++;
    add_reserved(replay, block->pool, mapped);
    return true;
}

static void unmap_block(Replay *replay, Block *block)
{
    u64 begin = right_of(block, block->address);
    u64 end = left_of(block, block->address + block->size);
    if (begin >= end)
        return;
    erase(replay, block);
    if (begin > block->address) {
        Block *before = part_of(replay, block, block->address, begin - block->address);
        splice(before, block->prev, block);
        insert_into_blocks(replay, before);
    }
    if (end < block->address + block->size) {
        Block *after = part_of(replay, block, end, block->address + block->size - end);
        splice(after, block, block->next);
        insert_into_blocks(replay, after);
    }
    block->address = begin;
    block->size = end - begin;
    block->mapped = false;
    try_merge_blocks(replay, block, block->prev);
    try_merge_blocks(replay, block, block->next);
    replay->settings.used_bytes -= end - begin;
    replay->counts.device_frees++;
    subtract_reserved(replay, block->pool, end - begin);
    if (is_split(block))
        insert_unmapped(block);
    else
        kill_block(replay, block);
}

static bool is_allocatable(const Block *block)
{
    return !block->allocated && !block->waits;
}

static bool has_available_address_space(const Block *block, u64 size)
{
    u64 available = 0;
    for (; available < size && block && is_allocatable(block); block = block->next)
        available += block->size;
    return available >= size;
}

static Block *reserve_range(Replay *replay, Pool *pool, i64 stream)
{
    u64 total = replay->settings.total_bytes;
    Block *block = new_block(replay);
    block->page = pool->is_small ? SMALL_BUFFER : replay->settings.large_segment_size;
    block->size = (total + total / 8 + block->page - 1) / block->page * block->page;
    block->address = block->range = reserve_addresses(replay, block->size);
    block->registration_counter = next_counter(replay);
    block->stream = stream;
    block->pool = pool;
    block->mapped = false;
    insert_unmapped(block);
    return block;
}

static Block *find_expandable_block(Replay *replay, Pool *pool, i64 number, u64 size)
{
    Stream *stream = of_stream(pool, number);
    for (size_t i = 0; i < stream->unmapped_count; i++) {
        Block *unmapped = stream->unmapped[i], *before = unmapped->prev;
        Block *start = before && is_allocatable(before) ? before : unmapped;
        if (has_available_address_space(start, size))
            return start;
    }
    return reserve_range(replay, pool, number);
}

static u64 smaller(u64 a, u64 b)
{
    return a < b ? a : b;
}

static Block *try_allocate_expandable_block(Replay *replay, Pool *pool, i64 stream, u64 size)
{
    Block *block = find_expandable_block(replay, pool, stream, size);
    if (!block->mapped && !map_block(replay, block, smaller(block->size, size)))
        return NULL;
    while (block->size < size) {
        Block *unmapped = block->next;
        if (!unmapped || !map_block(replay, unmapped, smaller(size - block->size, unmapped->size)))
            return NULL;
        block = unmapped;
    }
    erase(replay, block);
    return block;
}

static Block *cuda_malloc(Replay *replay, Pool *pool, i64 stream, u64 size)
{
    if (!claim(replay, size))
        return NULL;
    Block *block = new_block(replay);
    block->address = reserve_addresses(replay, size);
    block->size = size;
    block->pool = pool;
    block->stream = stream;
    block->registration_counter = next_counter(replay);
    replay->counts.device_allocs++;
    add_reserved(replay, pool, size);
    return block;
}

static void release_block(Replay *replay, Block *block)
{
    replay->settings.used_bytes -= block->size;
    replay->counts.device_frees++;
    subtract_reserved(replay, block->pool, block->size);
    erase(replay, block);
    kill_block(replay, block);
}

typedef struct {
    Block **blocks;
    size_t count, room;
} List;

static void append(List *list, Block *block)
{
    list->blocks = grown(list->blocks, list->count, &list->room, sizeof *list->blocks);
    list->blocks[list->count++] = block;
}

static void append_tree(List *list, Block *root)
{
    if (root) {
        append_tree(list, root->left);
        append(list, root);
        append_tree(list, root->right);
    }
}

static List free_blocks(const Pool *pool)
{
    List list = {0};
    for (Stream *stream = pool->streams; stream; stream = stream->following)
        append_tree(&list, stream->root);
    return list;
}

static void release_blocks(Replay *replay, Pool *pool)
{
    List list = free_blocks(pool);
    for (size_t i = 0; i < list.count; i++) {
        if (list.blocks[i]->page)
            unmap_block(replay, list.blocks[i]);
        else if (!is_split(list.blocks[i]))
            release_block(replay, list.blocks[i]);
    }
    free(list.blocks);
}

static bool release_available_cached_blocks(Replay *replay, Pool *pool, i64 number, u64 size)
{
    u64 oversize = replay->settings.max_split_size, released = 0;
    if (oversize == NO_LIMIT)
        return false;
    u64 needed = size > oversize ? size : oversize;
    Block *root = of_stream(pool, number)->root, *block = at_least(root, needed);
    if (block && !block->page) {
        release_block(replay, block);
        return true;
    }
    List list = {0};
    for (block = at_least(root, oversize); block && block->size < needed;
         block = following(root, block))
        append(&list, block);
    while (list.count && released < needed) {
        block = list.blocks[--list.count];
        if (!block->page) {
            released += block->size;
            release_block(replay, block);
        }
    }
    free(list.blocks);
    return released >= needed;
}

static void garbage_collect_cached_blocks(Replay *replay, u64 target)
{
    Pool *pool = &replay->pools[1];
    List list = free_blocks(pool);
    u64 calls = pool->get_free_blocks_call_count, reclaimed = 0;
    size_t count = 0;
    for (size_t i = 0; i < list.count; i++)
        if (!is_split(list.blocks[i]))
            list.blocks[count++] = list.blocks[i];
    while (reclaimed < target && count) {
        u64 sum = 0;
        size_t kept = 0;
        for (size_t i = 0; i < count; i++)
            sum += calls - list.blocks[i]->gc_count_base;
        double mean = (double)sum / (double)count;
        for (size_t i = 0; i < count; i++) {
            Block *block = list.blocks[i];
            if ((double)(calls - block->gc_count_base) < mean) {
                list.blocks[kept++] = block;
            } else {
                reclaimed += block->size;
                release_block(replay, block);
            }
        }
        count = kept;
    }
    free(list.blocks);
}

static void release_unused_pool(Replay *replay, size_t place)
{
    int number = replay->freeable[place];
    PrivatePool *private_pool = &replay->private_pools[number];
    release_blocks(replay, &replay->pools[2 * number]);
    release_blocks(replay, &replay->pools[2 * number + 1]);
    private_pool->exists = private_pool->is_freeable = private_pool->reserved;
}

static void release_cached_blocks(Replay *replay, int owner)
{
    if (!owner) {
        replay->counts.syncs++;
        complete_all(replay, 0);
        release_blocks(replay, &replay->pools[1]);
        release_blocks(replay, &replay->pools[0]);
    }
    size_t kept = 0;
    for (size_t i = 0; i < replay->freeable_count; i++) {
        int number = replay->freeable[i];
        if (owner == 0 || owner == number) {
            if (owner) {
                replay->counts.syncs++;
                complete_all(replay, number);
            }
            release_unused_pool(replay, i);
        }
        if (replay->private_pools[number].is_freeable)
            replay->freeable[kept++] = number;
    }
    replay->freeable_count = kept;
}

/* --- allocator.py --- */

typedef struct {
    Pool *pool;
    i64 stream;
    u64 orig_size, size, alloc_size;
} AllocParams;

static u64 rounded_up(u64 size, u64 step)
{
    return (size + step - 1) / step * step;
}

static u64 round_size(const Settings *settings, u64 size)
{
    int bits = size ? 64 - __builtin_clzll(size) : 0, entry = bits - 21;
    entry = entry < 0 ? 0 : entry > DIVISION_ENTRIES - 1 ? DIVISION_ENTRIES - 1 : entry;
    u64 divisions = (u64)settings->divisions[entry];
    if (divisions > 1 && size > MIN_BLOCK_SIZE * divisions)
        return rounded_up(size, (1ull << (bits - 1)) / divisions);
    return size < MIN_BLOCK_SIZE ? MIN_BLOCK_SIZE : rounded_up(size, MIN_BLOCK_SIZE);
}

static u64 get_allocation_size(const Settings *settings, u64 size)
{
    if (size <= SMALL_SIZE)
        return SMALL_BUFFER;
    return size < MIN_LARGE_ALLOC ? settings->large_segment_size : rounded_up(size, ROUND_LARGE);
}

static Block *get_free_block(Replay *replay, const AllocParams *params)
{
    Settings *settings = &replay->settings;
    if (settings->collects_garbage)
        params->pool->get_free_blocks_call_count++;
    Block *root = of_stream(params->pool, params->stream)->root;
    Block *block = at_least(root, params->size);
    if (block && block->page && settings->expandable_segments) {
        Block *next = following(root, block);
        while (next && block->page && expandable_size(next) < expandable_size(block)) {
            block = next;
            next = following(root, block);
        }
    } else {
        while (block && block->page)
            block = following(root, block);
    }
    if (!block || !may_use(settings, block->size, params->size))
        return NULL;
    erase(replay, block);
    return block;
}

/* Sets `is_rejected` if `throw_on_cudamalloc_oom` rejects the request. */
static Block *alloc_block(Replay *replay, const AllocParams *params, bool *is_rejected)
{
    Settings *settings = &replay->settings;
    u64 total = replay->reserved[0] + replay->reserved[1] + params->alloc_size;
    if (settings->allowed != NO_LIMIT && total > settings->allowed)
        return NULL;
    if (settings->rejection_bytes != NO_LIMIT && total > settings->rejection_bytes) {
        *is_rejected = true;
        return NULL;
    }
    if (settings->expandable_segments)
        return try_allocate_expandable_block(replay, params->pool, params->stream, params->size);
    return cuda_malloc(replay, params->pool, params->stream, params->alloc_size);
}

static Block *get_new_block(Replay *replay, const AllocParams *params, bool *is_rejected)
{
    u64 reserved = replay->reserved[0] + replay->reserved[1];
    if (replay->settings.collects_garbage && reserved > replay->settings.gc_threshold_bytes)
        garbage_collect_cached_blocks(replay, reserved - replay->settings.gc_threshold_bytes);
    Block *block = alloc_block(replay, params, is_rejected);
    if (!block && !*is_rejected &&
        release_available_cached_blocks(replay, params->pool, params->stream, params->size))
        block = alloc_block(replay, params, is_rejected);
    if (!block && !*is_rejected) {
        release_cached_blocks(replay, 0);
        replay->counts.retries++;
        block = alloc_block(replay, params, is_rejected);
    }
    return block;
}

static Block *alloc_found_block(Replay *replay, Block *block, const AllocParams *params, bool split)
{
    Pool *pool = block->pool;
    bool already_split = is_split(block);
    i64 inactive_split = 0;
    if (split) {
        Block *remaining = block;
        block = split_head(replay, remaining, params->size);
        insert_into_blocks(replay, remaining);
        inactive_split = already_split ? -(i64)params->size : (i64)remaining->size;
    } else if (already_split) {
        inactive_split = -(i64)block->size;
    }
    block->allocated = true;
    block->requested_size = params->orig_size;
    add_allocated(replay, pool, block->size);
    if (!block->page)
        inactive_split_changed(replay, pool, inactive_split);
    return block;
}

static Block *malloc_block(Replay *replay, u64 size, i64 stream, int owner, int *reason)
{
    Settings *settings = &replay->settings;
    bool is_rejected = false;
    AllocParams params = {NULL, stream, size, round_size(settings, size), 0};
    params.pool = &replay->pools[2 * owner + (params.size > SMALL_SIZE)];
    params.alloc_size = get_allocation_size(settings, params.size);
    Block *block = NULL;
    if (!settings->takes_best_fit) {
        block = get_free_block(replay, &params);
    } else if ((block = at_least(of_stream(params.pool, stream)->root, params.size))) {
        erase(replay, block);
    }
    if (!block)
        block = get_new_block(replay, &params, &is_rejected);
    if (block) {
        bool is_expandable = settings->expandable_segments && block->pool == params.pool;
        bool split = should_split(settings, block, params.size, is_expandable);
        return alloc_found_block(replay, block, &params, split);
    }
    replay->counts.ooms += !is_rejected;
    replay->counts.requested = is_rejected ? size : params.alloc_size;
    *reason = is_rejected ? REJECTED : OOM;
    return NULL;
}

static void free_block(Replay *replay, Block *block)
{
    Block *neighbors[] = {block->prev, block->next};
    i64 split_size = 0;
    for (int i = 0; i < 2; i++)
        split_size -= (i64)try_merge_blocks(replay, block, neighbors[i]);
    insert_into_blocks(replay, block);
    if (is_split(block))
        split_size += (i64)block->size;
    if (!block->page)
        inactive_split_changed(replay, block->pool, split_size);
}

static void free_allocated(Replay *replay, Block *block, bool is_used_elsewhere)
{
    block->allocated = false;
    replay->allocated[!block->pool->is_small] -= block->size;
    if (is_used_elsewhere)
        insert_events(replay, block);
    else
        free_block(replay, block);
}

/* --- the replay, as `Executor` of whatif/replay.py --- */

static void count_stranded(Replay *replay, i64 number)
{
    i64 stranded = stranded_bytes(replay);
    if (stranded > replay->stranded)
        replay->stranded = stranded;
    if (stranded > replay->counts.worst_stranded) {
        replay->counts.worst_stranded = stranded;
        replay->counts.worst_event = number;
    }
}

static void sample(Replay *replay, i64 number)
{
    Counts *counts = &replay->counts;
    i64 pause = replay->settings.events / replay->settings.samples;
    if (replay->reserved_peak > counts->peak_reserved)
        counts->peak_reserved = replay->reserved_peak;
    if (replay->allocated_peak > counts->peak_allocated)
        counts->peak_allocated = replay->allocated_peak;
    count_stranded(replay, number);
    replay->points =
        grown(replay->points, replay->point_count, &replay->point_room, sizeof *replay->points);
    replay->points[replay->point_count++] = (Point){
        number, (i64)replay->reserved_peak, (i64)replay->allocated_peak, replay->stranded};
    replay->stranded = stranded_bytes(replay);
    replay->reserved_peak = replay->reserved[0] + replay->reserved[1];
    replay->allocated_peak = replay->allocated[0] + replay->allocated[1];
    replay->sample_above = (double)counts->peak_reserved * PEAK_GROWTH;
    replay->sample_at = number + (pause > 1 ? pause : 1);
}

static int execute(Replay *replay, int operation, i64 number, i64 slot, u64 size, i64 stream,
                   int owner)
{
    int reason = DONE;
    Block *block = slot < 0 ? NULL : replay->slots[slot];
    switch (operation) {
    case MALLOC:
    case TRY_MALLOC:
        if (owner && !replay->private_pools[owner].exists)
            return UNSUPPORTED;
        block = malloc_block(replay, size, stream, owner, &reason);
        if (block && operation == TRY_MALLOC)
            free_allocated(replay, block, false);
        else if (block)
            set_slot(replay, slot, block);
        if (block && operation == MALLOC && (double)replay->reserved_peak > replay->sample_above)
            sample(replay, number);
        break;
    case FREE:
        if (block && block->allocated)
            free_allocated(replay, block, false);
        set_slot(replay, slot, NULL);
        break;
    case FREE_LATER:
        if (block && block->allocated)
            free_allocated(replay, block, block->stream != AWAITED_STREAM);
        break;
    case COMPLETE:
        if (block && block->waits)
            complete_event(replay, block);
        set_slot(replay, slot, NULL);
        break;
    case RELEASE_POOL:
        if (!replay->private_pools[owner].exists)
            return UNSUPPORTED;
        if (!--replay->private_pools[owner].use_count) {
            replay->private_pools[owner].is_freeable = true;
            replay->freeable[replay->freeable_count++] = owner;
        }
        break;
    default:
        release_cached_blocks(replay, operation == EMPTY_POOL ? owner : 0);
    }
    return replay->is_broken ? UNSUPPORTED : reason;
}

/* Executes instructions from `first` on; returns at the first one that fails, with its place in
 * `*place`. */
int replay_run(Replay *replay, const uint8_t *operations, const i64 *numbers, const int32_t *slots,
               const u64 *sizes, const i64 *streams, const int32_t *owners, size_t first,
               size_t count, size_t *place)
{
    if (setjmp(out_of_memory))
        return NO_MEMORY;
    for (size_t i = first; i < count; i++) {
        int reason = execute(replay, operations[i], numbers[i], slots[i], sizes[i], streams[i],
                             owners[i]);
        *place = i;
        if (reason != DONE)
            return reason;
        if (stranded_bytes(replay) > replay->stranded)
            count_stranded(replay, numbers[i]);
        if (numbers[i] >= replay->sample_at)
            sample(replay, numbers[i]);
    }
    return DONE;
}

int replay_sample(Replay *replay, i64 number)
{
    if (setjmp(out_of_memory))
        return NO_MEMORY;
    sample(replay, number);
    return DONE;
}

/* Checks what follows each instruction, for one that failed and does not end the replay. */
int replay_go_on(Replay *replay, i64 number)
{
    if (setjmp(out_of_memory))
        return NO_MEMORY;
    if (stranded_bytes(replay) > replay->stranded)
        count_stranded(replay, number);
    if (number >= replay->sample_at)
        sample(replay, number);
    return DONE;
}

const Counts *replay_counts(Replay *replay)
{
    Counts *counts = &replay->counts;
    counts->reserved = replay->reserved[0] + replay->reserved[1];
    counts->allocated = replay->allocated[0] + replay->allocated[1];
    counts->free_bytes = replay->settings.total_bytes - replay->settings.used_bytes;
    return counts;
}

const Point *replay_points(Replay *replay, size_t *count)
{
    *count = replay->point_count;
    return replay->points;
}

static void write_block(List *all, BlockState *states, size_t place, const Pool *pools)
{
    const Block *block = all->blocks[place];
    states[place] = (BlockState){
        .address = block->address,
        .size = block->size,
        .requested_size = block->requested_size,
        .page = block->page,
        .stream = block->stream,
        .pool = (int32_t)(block->pool - pools),
        .allocated = block->allocated,
        .mapped = block->mapped,
        .waits = block->waits,
        .prev = block->prev ? 0 : -1,
    };
}

/* Returns all blocks, segment by segment. `*states` is to be freed by `replay_forget`; it is NULL if
 * memory ran out. */
size_t replay_blocks(Replay *replay, BlockState **states)
{
    List all = {0};
    *states = NULL;
    if (setjmp(out_of_memory))
        return 0;
    for (struct Chunk *chunk = replay->chunks; chunk; chunk = chunk->following)
        for (int i = 0; i < CHUNK; i++) {
            Block *head = &chunk->blocks[i];
            if (head->is_used && !head->is_dead && !head->prev)
                for (; head; head = head->next)
                    append(&all, head);
        }
    *states = checked(calloc(all.count + 1, sizeof **states));
    for (size_t i = 0; i < all.count; i++)
        write_block(&all, *states, i, replay->pools);
    free(all.blocks);
    return all.count;
}

void replay_forget(BlockState *states)
{
    free(states);
}

static void load(Replay *replay, const BlockState *states, size_t count, const i64 *held,
                 size_t held_count)
{
    Block **blocks = checked(calloc(count + 1, sizeof *blocks));
    for (size_t i = 0; i < count; i++)
        blocks[i] = new_block(replay);
    for (size_t i = 0; i < count; i++) {
        const BlockState *state = &states[i];
        Block *block = blocks[i];
        block->address = state->address;
        block->size = state->size;
        block->requested_size = state->requested_size;
        block->registration_counter = state->registration_counter;
        block->range = state->range;
        block->page = state->page;
        block->page_parts = state->page_parts;
        block->stream = state->stream;
        block->pool = &replay->pools[state->pool];
        block->allocated = state->allocated;
        block->mapped = state->mapped;
        block->prev = state->prev < 0 ? NULL : blocks[state->prev];
        block->next = state->next < 0 ? NULL : blocks[state->next];
        if (state->is_free == ONLY_STREAM) {
            of_stream(block->pool, block->stream);
            recycle(replay, block);
            continue;
        }
        if (state->is_free && block->mapped)
            tree_insert(&of_stream(block->pool, block->stream)->root, block);
        else if (state->is_free)
            insert_unmapped(block);
        block->gc_count_base = state->gc_count_base;
        if (state->waits)
            insert_events(replay, block);
    }
    for (size_t i = 0; i < held_count; i++)
        set_slot(replay, held[2 * i], blocks[held[2 * i + 1]]);
    free(blocks);
}

void replay_free(Replay *replay)
{
    for (int i = 0; replay->pools && i < 2 * replay->settings.pools; i++)
        for (Stream *stream = replay->pools[i].streams, *next; stream; stream = next) {
            next = stream->following;
            free(stream->unmapped);
            free(stream);
        }
    for (struct Chunk *chunk = replay->chunks, *next; chunk; chunk = next) {
        next = chunk->following;
        free(chunk);
    }
    free(replay->pools);
    free(replay->private_pools);
    free(replay->freeable);
    free(replay->slots);
    free(replay->points);
    free(replay);
}

/* `held`: pairs of a slot and the place of the block that it refers to. `calls`: how often free blocks were searched for in each pool. `use_counts`: the users of each
 * private pool. The blocks that wait must be in the order of their queue. Returns NULL if memory ran
 * out. */
Replay *replay_new(const Settings *settings, const BlockState *states, size_t count,
                   const i64 *held, size_t held_count, size_t slots, const u64 *reserved,
                   const u64 *allocated, const i64 *inactive_split, const u64 *calls,
                   const u64 *use_counts, const u64 *private_reserved)
{
    Replay *volatile kept = NULL;
    if (setjmp(out_of_memory)) {
        if (kept)
            replay_free(kept);
        return NULL;
    }
    Replay *replay = kept = checked(calloc(1, sizeof *replay));
    replay->settings = *settings;
    replay->seed = 2463534242u;
    replay->counts.worst_event = -1;
    replay->stranded_offset = settings->stranded_offset;
    size_t pools = (size_t)settings->pools;
    replay->pools = checked(calloc(2 * pools, sizeof *replay->pools));
    replay->private_pools = checked(calloc(pools, sizeof *replay->private_pools));
    replay->freeable = checked(calloc(pools, sizeof *replay->freeable));
    replay->slots = checked(calloc(slots + 1, sizeof *replay->slots));
    for (size_t i = 0; i < 2 * pools; i++) {
        Pool *pool = &replay->pools[i];
        pool->end = &pool->streams;
        pool->owner = (int)(i / 2);
        pool->is_small = i % 2 == 0;
        pool->get_free_blocks_call_count = calls[i];
    }
    for (size_t i = 0; i < pools; i++)
        replay->private_pools[i] = (PrivatePool){private_reserved[i], use_counts[i], true, false};
    for (int i = 0; i < 2; i++) {
        replay->reserved[i] = reserved[i];
        replay->allocated[i] = allocated[i];
        replay->inactive_split[i] = inactive_split[i];
    }
    replay->reserved_peak = reserved[0] + reserved[1];
    replay->allocated_peak = allocated[0] + allocated[1];
    load(replay, states, count, held, held_count);
    return replay;
}
