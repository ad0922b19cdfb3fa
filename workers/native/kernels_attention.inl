// Attention of one unit: the queries of a few consecutive tokens that share one KV head, over their request's blocks.
//
// Rows r = token * group + head of the unit. Scores of up to KEY_ROWS rows lie in scratch as [rows][length], their
// first column a position that is a multiple of KEY_STEP: a position's lane is the same in every chunk. A row's maximum,
// sum and values run over positions in order; what a row may not see counts exactly 0.

constexpr int KEY_STEP = KEY_VECTORS * LANES;
constexpr int PREFETCH_ROWS = 4;

// Where the keys and values of one KV head lie in a block.
struct HeadCache {
    const uint8_t *data;
    const int64_t *table;
    int64_t block_stride, value_offset, block_tokens, head_dim, element_bytes;
    bool key_is_dim_major;

    INLINE_METHOD const uint8_t *block_of(int64_t position) const {
        const int64_t block = table[position / block_tokens];
        return data + (block < 0 ? 0 : block) * block_stride;
    }
    INLINE_METHOD const uint8_t *token_of(int64_t position) const {
        return block_of(position) + position % block_tokens * head_dim * element_bytes;
    }
};

HeadCache make_head_cache(const AttentionJob &job, const BatonSpan &span, int64_t kv_head) {
    const BatonAttention &a = *job.attention;
    const BatonCache &c = job.cache;
    const int64_t element = c.is_bf16 ? 2 : 4, head = c.block_tokens * a.head_dim * element;
    HeadCache cache;
    cache.data = (const uint8_t *)c.data + kv_head * head;
    cache.table = job.tables->table + span.first_entry;
    cache.block_stride = 2 * a.num_kv_heads * head;
    cache.value_offset = a.num_kv_heads * head;
    cache.block_tokens = c.block_tokens;
    cache.head_dim = a.head_dim;
    cache.element_bytes = element;
    cache.key_is_dim_major = c.key_is_dim_major;
    return cache;
}

// --- scores: q times 16 or 32 keys ------------------------------------------------------------------------------------

// Keys of 16 positions, dim by dim: dim d of them starts at first + d * stride. `next` is what comes after them.
template <class T>
struct KeyTile {
    const T *first[KEY_VECTORS];
    const T *next;
    int64_t stride;
};

// The few queries of a decode go as fast as memory. A block of the cache is shorter than a page, where the processor's
// own prefetch ends: the next block is asked for while this one is worked on. Prompts read theirs from the cache.
template <int R>
INLINE void prefetch_next(const void *p) {
    if constexpr (R <= PREFETCH_ROWS) __builtin_prefetch(p);
}

template <class T, int R>
NOINLINE void score_tile(const float *q, int64_t head_dim, const KeyTile<T> keys, float *scores, int64_t length) {
    F total[R][KEY_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < KEY_VECTORS; v++) total[r][v] = splat(0.0f);
    for (int64_t d = 0; d < head_dim; d++) {
        F key[KEY_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < KEY_VECTORS; v++) key[v] = load(keys.first[v] + d * keys.stride);
        prefetch_next<R>(keys.next + d * keys.stride);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const F x = splat(q[r * head_dim + d]);
#pragma GCC unroll 2
            for (int v = 0; v < KEY_VECTORS; v++) total[r][v] = fma(x, key[v], total[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int v = 0; v < KEY_VECTORS; v++) store(scores + r * length + v * LANES, total[r][v]);
}

template <class T, int R>
INLINE void score_rows(const float *q, int64_t head_dim, const KeyTile<T> &keys, float *scores, int64_t length, int rows) {
    if (rows == R) score_tile<T, R>(q, head_dim, keys, scores, length);
    if constexpr (R > 1) {
        if (rows < R) score_rows<T, R - 1>(q, head_dim, keys, scores, length, rows);
    }
}

// 16 keys turned dim-major into `panel`; positions from `end` on repeat the last one.
template <class T>
void turn_keys(const HeadCache &cache, int64_t position, int64_t end, float *panel) {
    for (int i = 0; i < LANES; i++) {
        const int64_t at = position + i < end ? position + i : end - 1;
        const bool by_dim = cache.key_is_dim_major;
        const T *key = (const T *)(by_dim ? cache.block_of(at) : cache.token_of(at));
        const int64_t first = by_dim ? at % cache.block_tokens : 0, stride = by_dim ? cache.block_tokens : 1;
        if (by_dim) {
            for (int64_t d = 0; d < cache.head_dim; d++) {
                T lanes[LANES] = {key[first + d * stride]};
                panel[d * LANES + i] = lane_of(load(lanes), 0);
            }
            continue;
        }
        for (int64_t d = 0; d < cache.head_dim; d += LANES) {
            float lanes[LANES];
            store(lanes, load(key + d));
            for (int j = 0; j < LANES; j++) panel[(d + j) * LANES + i] = lanes[j];
        }
    }
}

struct Window {
    int64_t first, low, high;   // columns start at `first`; some row sees `low` and all see less than `high`
    int64_t length;             // columns, a multiple of KEY_STEP
};

template <class T>
void score_keys(const HeadCache &cache, const Window &w, const float *q, int rows, float *scores, float *panel) {
    const int64_t dim = cache.head_dim;
    const bool as_they_lie = cache.key_is_dim_major && cache.block_tokens % LANES == 0;
    for (int64_t p = w.first; p < w.high; p += KEY_STEP) {
        float *out = scores + (p - w.first);
        if (as_they_lie) {
            KeyTile<T> keys;
            keys.stride = cache.block_tokens;
            for (int v = 0; v < KEY_VECTORS; v++) {
                const int64_t at = p + v * LANES < w.high ? p + v * LANES : p;
                keys.first[v] = (const T *)cache.block_of(at) + at % cache.block_tokens;
            }
            const int64_t next = p + KEY_STEP;
            keys.next = next < w.high ? (const T *)cache.block_of(next) + next % cache.block_tokens
                                      : (const T *)(cache.token_of(w.low) + cache.value_offset);
            score_rows<T, KEY_ROWS>(q, dim, keys, out, w.length, rows);
            continue;
        }
        KeyTile<float> keys;
        keys.stride = LANES;
        keys.next = panel;
        for (int v = 0; v < KEY_VECTORS; v++) {
            keys.first[v] = panel + v * LANES * dim;
            if (p + v * LANES < w.high) turn_keys<T>(cache, p + v * LANES, w.high, panel + v * LANES * dim);
        }
        score_rows<float, KEY_ROWS>(q, dim, keys, out, w.length, rows);
    }
}

// --- softmax ----------------------------------------------------------------------------------------------------------

// Scores of a row become shares times their sum; returns 1 / sum. Columns outside [low, high) become 0.
float soften_row(float *scores, int64_t low, int64_t high, int64_t length, float softcap, const float *sink) {
    const float nothing = -__builtin_inff();
    if (softcap > 0.0f) softcap_row(scores, softcap, length);
    for (int64_t i = 0; i < low; i++) scores[i] = nothing;
    for (int64_t i = high; i < length; i++) scores[i] = nothing;
    F most = splat(sink ? *sink : nothing);
    for (int64_t i = 0; i < length; i += LANES) most = max_of(most, load(scores + i));
    most = splat(largest(most));
    F total = splat(0.0f);
    for (int64_t i = 0; i < length; i += LANES) {
        const F share = exp_of(sub(load(scores + i), most));
        total = add(total, share);
        store(scores + i, share);
    }
    float whole = sum(total);
    if (sink) whole += lane_of(exp_of(sub(splat(*sink), most)), 0);
    return 1.0f / whole;
}

// --- values -----------------------------------------------------------------------------------------------------------

struct ValueRows {
    const float *shares;        // [rows][length], column 0 at position `first`
    int64_t length;
    const float *factors;       // [rows]
    float *const *out;          // [rows], the head's output
};

template <class T, int R, int C>
NOINLINE void value_tile(const HeadCache &cache, const Window &w, const ValueRows v, int64_t dim) {
    F total[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) total[r][c] = splat(0.0f);
    for (int64_t p = w.low; p < w.high;) {
        const int64_t left = cache.block_tokens - p % cache.block_tokens;
        const int64_t end = p + left < w.high ? p + left : w.high;
        const T *value = (const T *)(cache.token_of(p) + cache.value_offset) + dim;
        const T *next = (const T *)(cache.token_of(end < w.high ? end : p) + cache.value_offset) + dim;
        const float *shares = v.shares + (p - w.first);
        for (; p < end; p++, value += cache.head_dim, next += cache.head_dim, shares++) {
            prefetch_next<R>(next);
            if (C * LANES * sizeof(T) > 64) prefetch_next<R>(next + 64 / sizeof(T));
            F columns[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) columns[c] = load(value + c * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const F share = splat(shares[r * v.length]);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) total[r][c] = fma(share, columns[c], total[r][c]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(v.out[r] + dim + c * LANES, mul(total[r][c], splat(v.factors[r])));
}

template <class T, int R, int C>
INLINE void value_rest(const HeadCache &cache, const Window &w, const ValueRows &v, int64_t dim, int rows) {
    if (rows == R) value_tile<T, R, C>(cache, w, v, dim);
    if constexpr (R > 1) {
        if (rows < R) value_rest<T, R - 1, C>(cache, w, v, dim, rows);
    }
}

template <class T>
void sum_values(const HeadCache &cache, const Window &w, ValueRows v, int rows) {
    for (int done = 0; done < rows; done += VALUE_ROWS) {
        const int now = rows - done < VALUE_ROWS ? rows - done : VALUE_ROWS;
        int64_t dim = 0;
        for (; dim + VALUE_VECTORS * LANES <= cache.head_dim; dim += VALUE_VECTORS * LANES)
            value_rest<T, VALUE_ROWS, VALUE_VECTORS>(cache, w, v, dim, now);
        for (; dim < cache.head_dim; dim += LANES) value_rest<T, VALUE_ROWS, 1>(cache, w, v, dim, now);
        v.shares += VALUE_ROWS * v.length;
        v.factors += VALUE_ROWS;
        v.out += VALUE_ROWS;
    }
}

// --- a unit -----------------------------------------------------------------------------------------------------------

// Up to KEY_ROWS rows of a unit: what each of them reads, sees and writes.
struct UnitRows {
    int num;
    float *q;                               // [num][head_dim], scaled
    int64_t low[MAX_ATTENTION_ROWS], high[MAX_ATTENTION_ROWS];
    const float *sink[MAX_ATTENTION_ROWS];
    float *out[MAX_ATTENTION_ROWS];
};

void gather_row(const AttentionJob &job, const AttentionUnit &unit, int64_t r, UnitRows &rows) {
    const BatonAttention &a = *job.attention;
    const BatonSpan &span = job.tables->spans[unit.span];
    const int64_t group = a.num_heads / a.num_kv_heads, head = unit.kv_head * group + r % group;
    const int64_t token = unit.first_token + r / group, row = span.first_row + token;
    const int i = rows.num++;
    const float *q = job.q + row * job.q_stride + head * a.head_dim;
    for (int64_t d = 0; d < a.head_dim; d += LANES) store(rows.q + i * a.head_dim + d, mul(load(q + d), splat(a.scale)));
    rows.high[i] = span.first_position + token + 1;
    rows.low[i] = a.window > 0 && rows.high[i] > a.window ? rows.high[i] - a.window : 0;
    rows.sink[i] = a.sinks ? a.sinks + head : nullptr;
    rows.out[i] = job.out + ((unit.first_out + r / group) * a.num_heads + head) * a.head_dim;
}

Window window_of(const UnitRows &rows) {
    Window w = {0, rows.low[0], rows.high[rows.num - 1], 0};    // rows are in the order of their tokens
    w.first = w.low / KEY_STEP * KEY_STEP;
    w.length = (w.high - w.first + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
    return w;
}

template <class T>
void attend_rows(const AttentionJob &job, const HeadCache &cache, const UnitRows &rows, float *scratch) {
    const Window w = window_of(rows);
    float *panel = scratch, *scores = panel + KEY_STEP * cache.head_dim;
    score_keys<T>(cache, w, rows.q, rows.num, scores, panel);
    float factors[MAX_ATTENTION_ROWS];
    for (int r = 0; r < rows.num; r++)
        factors[r] = soften_row(scores + r * w.length, rows.low[r] - w.first, rows.high[r] - w.first, w.length,
                                job.attention->softcap, rows.sink[r]);
    sum_values<T>(cache, w, {scores, w.length, factors, rows.out}, rows.num);
}

void attend(const AttentionJob &job, const AttentionUnit &unit, float *scratch) {
    const BatonAttention &a = *job.attention;
    const HeadCache cache = make_head_cache(job, job.tables->spans[unit.span], unit.kv_head);
    const int64_t total = unit.num_tokens * (a.num_heads / a.num_kv_heads);
    for (int64_t first = 0; first < total; first += KEY_ROWS) {
        UnitRows rows;
        rows.num = 0;
        rows.q = scratch;
        for (int64_t r = first; r < total && r < first + KEY_ROWS; r++) gather_row(job, unit, r, rows);
        float *rest = scratch + KEY_ROWS * a.head_dim;
        if (job.cache.is_bf16) attend_rows<uint16_t>(job, cache, rows, rest);
        else attend_rows<float>(job, cache, rows, rest);
    }
}
