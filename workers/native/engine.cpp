#include "engine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <utility>

namespace baton {
namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
constexpr int64_t PIECE_BYTES = 32 << 20;

}  // namespace

Buffer::~Buffer() { free(data_); }

Buffer::Buffer(Buffer &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

void Buffer::reserve(int64_t bytes) {
    if (bytes <= size_) return;
    const int64_t page = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    bytes = round_up(bytes, page);
    free(data_);
    data_ = nullptr;
    size_ = 0;
    if (posix_memalign(&data_, (size_t)page, (size_t)bytes)) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (page == HUGE_PAGE) madvise(data_, (size_t)bytes, MADV_HUGEPAGE);
#endif
    size_ = bytes;
}

Arena::Place Arena::take(int64_t bytes) {
    bytes = round_up(bytes, 64);
    if (!piece_ || used_ + bytes > piece_->size()) {
        auto piece = std::make_shared<Buffer>();
        piece->reserve(std::max(bytes, PIECE_BYTES));
        piece_ = std::move(piece);
        used_ = 0;
    }
    used_ += bytes;
    return {piece_, piece_->as<uint8_t>() + used_ - bytes};
}

void RoundedBuffers::reserve(int64_t rows, int64_t k) {
    q.reserve(rows * k);
    const int64_t bytes = rows * num_groups(k) * 4;
    for (Buffer *buffer : {&scale, &scaled_sum, &offset}) buffer->reserve(bytes);
}

Activations RoundedBuffers::view(const float *x, int64_t k) const {
    return {k, x, q.as<int8_t>(), scale.as<float>(), scaled_sum.as<float>(), offset.as<int32_t>()};
}

int64_t linear_scratch_bytes(int64_t k) { return 2 * num_groups(k) * 640 + 64; }

int64_t draw_scratch_bytes(int64_t width) {
    return round_up(width, 2 * LANES) * 4 + (width / 1024 + 1) * 8 + width * 8;  // weights, sums of blocks, candidates
}

int64_t attention_scratch_bytes(int64_t context, int64_t head_dim) {
    const int64_t columns = round_up(context, 32) + 32;
    return 4 * (MAX_ATTENTION_ROWS * head_dim + 32 * head_dim + MAX_ATTENTION_ROWS * columns) + 64;
}

bool are_sound(const BatonTables &t, const BatonAttention &a, const BatonCache &cache) {
    const auto is_below = [](int64_t i, int64_t limit) { return i >= 0 && i < limit; };
    int64_t next_row = 0;
    for (int64_t s = 0; s < t.num_spans; s++) {
        const BatonSpan &span = t.spans[s];
        const int64_t context = span.first_position + span.num_tokens;
        if (span.first_row != next_row || span.num_tokens < 1 || span.first_position < 0) return false;
        if (span.first_entry < 0 || span.first_entry + span.num_blocks > t.num_entries) return false;
        if (span.num_blocks * cache.block_tokens < context) return false;
        next_row += span.num_tokens;
    }
    for (int64_t i = 0; i < t.num_entries; i++)
        if (!is_below(t.table[i] + 1, cache.num_blocks + 1)) return false;
    for (int64_t i = 0; i < t.num_tokens; i++) {
        if (!is_below(t.block_of[i], cache.num_blocks) || !is_below(t.slot_of[i], cache.block_tokens)) return false;
        if (a.rope_pairs && !is_below(t.positions[i], a.rope_positions)) return false;
    }
    return next_row == t.num_tokens && a.head_dim % LANES == 0;
}

// Units hold as many tokens as make MAX_ATTENTION_ROWS queries. The longest contexts come first, so that threads end
// together.
std::vector<AttentionUnit> plan_units(const BatonTables &tables, const BatonAttention &attention) {
    const int64_t group = attention.num_heads / attention.num_kv_heads;
    const int64_t step = std::max<int64_t>(1, MAX_ATTENTION_ROWS / group);
    std::vector<AttentionUnit> units;
    for (int64_t s = 0; s < tables.num_spans; s++) {
        const int64_t count = tables.spans[s].num_tokens;
        for (int64_t last = (count - 1) / step * step; last >= 0; last -= step)
            for (int64_t head = 0; head < attention.num_kv_heads; head++)
                units.push_back({s, last, std::min(step, count - last), head, tables.spans[s].first_row + last});
    }
    return units;
}

// One token whose output is row `out`.
AttentionUnit plan_unit(const BatonTables &tables, int64_t row, int64_t kv_head, int64_t out) {
    int64_t span = 0;
    while (row >= tables.spans[span].first_row + tables.spans[span].num_tokens) span++;
    return {span, row - tables.spans[span].first_row, 1, kv_head, out};
}

BatonCache cache_of(const BatonCache &all, const BatonAttention &a, int64_t layer) {
    const int64_t element = all.is_bf16 ? 2 : 4;
    const int64_t bytes = all.num_blocks * 2 * a.num_kv_heads * all.block_tokens * a.head_dim * element;
    BatonCache cache = all;
    cache.data = static_cast<uint8_t *>(all.data) + layer * bytes;
    return cache;
}

int64_t longest_context(const BatonTables &tables) {
    int64_t longest = 0;
    for (int64_t s = 0; s < tables.num_spans; s++)
        longest = std::max(longest, tables.spans[s].first_position + tables.spans[s].num_tokens);
    return longest;
}

}  // namespace baton

using namespace baton;

void BatonEngine::reserve_scratch(int64_t bytes) {
    for (Buffer &buffer : scratch) buffer.reserve(bytes);
}

void BatonEngine::linear(int thread, const LinearJob &job, int64_t num_rows) {
    const Range blocks = share_of(job.weight->num_blocks, thread, pool.size());
    uint8_t *panel = scratch[thread].as<uint8_t>();
    for (int64_t row = 0; row < num_rows; row += ROWS_PER_PASS)
        kernels.linear(job, {row, std::min(row + ROWS_PER_PASS, num_rows)}, blocks, panel);
}

// Norm and rope of q and k in place, then k and v into the cache: all heads of one token.
void BatonEngine::rotate_and_store(const BatonAttention &a, const BatonTables &tables, const BatonCache &cache,
                                   int64_t row, float *qkv) const {
    for (int64_t head = 0; head < a.num_kv_heads; head++) rotate_group(a, tables, cache, row, head, qkv);
}

void BatonEngine::rotate_group(const BatonAttention &a, const BatonTables &tables, const BatonCache &cache, int64_t row,
                               int64_t kv_head, float *qkv) const {
    const int64_t d = a.head_dim, group = a.num_heads / a.num_kv_heads, position = tables.positions[row] * a.rope_pairs;
    const auto turn = [&](float *head, const float *norm) {
        if (norm) kernels.norm_row(head, norm, a.norm_eps, d, head);
        if (a.rope_pairs) kernels.rotate_row(a.cos + position, a.sin + position, a.rope_pairs, head);
    };
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; h++) turn(qkv + h * d, a.q_norm);
    float *key = qkv + (a.num_heads + kv_head) * d, *value = key + a.num_kv_heads * d;
    turn(key, a.k_norm);
    const int64_t element = cache.is_bf16 ? 2 : 4, head_bytes = cache.block_tokens * d * element;
    const int64_t slot = tables.slot_of[row];
    uint8_t *block = static_cast<uint8_t *>(cache.data) + tables.block_of[row] * 2 * a.num_kv_heads * head_bytes;
    uint8_t *keys = block + kv_head * head_bytes, *values = keys + a.num_kv_heads * head_bytes;
    kernels.store_row(value, d, cache.is_bf16, values + slot * d * element);
    if (cache.key_is_dim_major) kernels.store_column(key, d, cache.is_bf16, keys + slot * element, cache.block_tokens);
    else kernels.store_row(key, d, cache.is_bf16, keys + slot * d * element);
}

void BatonEngine::attend(int thread, const AttentionJob &job, const std::vector<AttentionUnit> &units,
                         std::atomic<int64_t> &next) {
    float *room = scratch[thread].as<float>();
    const int64_t count = (int64_t)units.size();
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) kernels.attend(job, units[i], room);
}
