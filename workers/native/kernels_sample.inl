// One row of logits to one token, as workers/sampling/sampler.py defines it: temperature, top-k, top-p, min-p, then the
// first token in the order of ids whose cumulated weight exceeds uniform * the weight of those kept.

constexpr int64_t SUM_BLOCK = 1024;     // weights summed as floats before they are added to a double

constexpr int64_t HEAD_CANDIDATES = 512;

struct Candidate {
    float weight;
    int32_t id;
};

INLINE float largest_logit(const float *x, int64_t width) {
    F most = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) most = max_of(most, load(x + i));
    float whole = largest(most);
    for (; i < width; i++) whole = x[i] > whole ? x[i] : whole;
    return whole;
}

// The largest and the first place it stands at; NaN where there is one. Read once: the place is looked for in a block.
int64_t find_largest(const float *x, int64_t width, float *most) {
    I bits = magnitude_bits(splat(0.0f));
    int64_t best = 0;
    *most = -INFINITY;
    for (int64_t low = 0; low < width; low += SUM_BLOCK) {
        const int64_t count = width - low < SUM_BLOCK ? width - low : SUM_BLOCK;
        F block = splat(-INFINITY);
        each_vector(count, [&](int64_t i, int n) {
            F v = load_some(x + low + i, n);
            bits = max_int(bits, magnitude_bits(v));
            if (n < LANES) v = splat(largest_logit(x + low + i, n));   // what is past the end is no logit
            block = max_of(block, v);
        });
        const float found = largest(block);
        if (found > *most) {
            *most = found;
            best = low;
        }
    }
    if (largest_int(bits) > 0x7f800000) *most = NAN;
    while (best + 1 < width && x[best] < *most) best++;
    return best;
}

// weights[i] = exp((x[i] - largest) / temperature), sums[b] = the sum of a block of them; returns the sum of all.
double temper_row(const float *x, int64_t width, float temperature, float *weights, double *sums) {
    const F most = splat(largest_logit(x, width)), inverse = splat(1.0f / temperature);
    double mass = 0.0;
    for (int64_t low = 0, block = 0; low < width; low += SUM_BLOCK, block++) {
        const int64_t count = width - low < SUM_BLOCK ? width - low : SUM_BLOCK;
        F total = splat(0.0f);
        each_vector(count, [&](int64_t i, int n) {
            const F weight = exp_of(mul(sub(load_some(x + low + i, n), most), inverse));
            store_some(weights + low + i, weight, n);
            total = add(total, load_some(weights + low + i, n));    // what is past the end counts as zero
        });
        sums[block] = (double)sum(total);
        mass += sums[block];
    }
    return mass;
}

// Of all tokens, in the order of ids. The last token with a weight where rounding leaves none.
int64_t pick_of_all(const float *weights, int64_t width, const double *sums, double target) {
    double before = 0.0;
    int64_t low = 0, block = 0, last = 0;
    for (; low + SUM_BLOCK < width && before + sums[block] <= target; low += SUM_BLOCK) before += sums[block++];
    for (int64_t i = low; i < width; i++) {
        before += (double)weights[i];
        if (weights[i] > 0.0f) last = i;
        if (before > target) return i;
    }
    return last;
}

int64_t gather_candidates(const float *weights, int64_t width, float least, Candidate *out) {
    int64_t count = 0;
    const auto take = [&](int64_t i) {
        if (weights[i] >= least) out[count++] = {weights[i], (int32_t)i};
    };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        if (largest(load(weights + i)) < least) continue;
        for (int lane = 0; lane < LANES; lane++) take(i + lane);
    }
    for (; i < width; i++) take(i);
    return count;
}

double weight_of(const Candidate *some, int64_t count) {
    double total = 0.0;
    for (int64_t i = 0; i < count; i++) total += (double)some[i].weight;
    return total;
}

INLINE bool is_heavier(const Candidate &a, const Candidate &b) {
    return a.weight != b.weight ? a.weight > b.weight : a.id < b.id;
}

// Whether the heaviest `count` hold all that top-k and top-p can keep.
bool is_enough(const Candidate *some, int64_t count, const BatonDraw &draw, double mass) {
    if (draw.top_k > 0) return count >= draw.top_k;
    return draw.top_p >= 1.0f || weight_of(some, count) >= draw.top_p * mass;
}

// The candidates that the filters can keep, in falling order, ties by id. Found among the heaviest of all tokens, the
// more the longer, and of those only the first are sorted where they are enough.
int64_t rank_candidates(const float *weights, int64_t width, const BatonDraw &draw, double mass, Candidate *out) {
    const bool has_min_p_only = draw.top_k <= 0 && draw.top_p >= 1.0f;
    float least = has_min_p_only ? draw.min_p : 0x1p-8f;
    int64_t count = gather_candidates(weights, width, least, out);
    while (least > 0.0f && !is_enough(out, count, draw, mass)) {
        least = least > 0x1p-60f ? least * 0x1p-8f : 0.0f;
        count = gather_candidates(weights, width, least, out);
    }
    if (count > HEAD_CANDIDATES && !has_min_p_only) {
        std::nth_element(out, out + HEAD_CANDIDATES, out + count, is_heavier);
        if (is_enough(out, HEAD_CANDIDATES, draw, mass)) count = HEAD_CANDIDATES;
    }
    std::sort(out, out + count, is_heavier);
    return count;
}

// How many of the ranked candidates are left after every filter.
int64_t count_kept(const Candidate *ranked, int64_t count, const BatonDraw &draw, double mass) {
    int64_t kept = count;
    if (draw.top_k > 0 && draw.top_k < kept) kept = draw.top_k;
    if (draw.top_p < 1.0f) {
        const double wanted = (double)draw.top_p * (draw.top_k > 0 ? weight_of(ranked, kept) : mass);
        double seen = 0.0;
        for (int64_t i = 0; i < kept; i++) {
            seen += (double)ranked[i].weight;
            if (seen >= wanted) kept = i + 1;
        }
    }
    while (kept > 1 && ranked[kept - 1].weight < draw.min_p * ranked[0].weight) kept--;
    return kept;
}

int64_t draw_row(const float *logits, int64_t width, const BatonDraw &draw, float *scratch) {
    float *weights = scratch;
    double *sums = (double *)(scratch + round_up(width, 2 * LANES));
    Candidate *ranked = (Candidate *)(sums + width / SUM_BLOCK + 1);
    const double mass = temper_row(logits, width, draw.temperature, weights, sums);
    if (draw.top_k <= 0 && draw.top_p >= 1.0f && draw.min_p <= 0.0f)
        return pick_of_all(weights, width, sums, draw.uniform * mass);
    const int64_t count = rank_candidates(weights, width, draw, mass, ranked);
    const int64_t kept = count_kept(ranked, count, draw, mass);
    std::sort(ranked, ranked + kept, [](const Candidate &a, const Candidate &b) { return a.id < b.id; });
    const double target = draw.uniform * weight_of(ranked, kept);
    double before = 0.0;
    int64_t last = ranked[0].id;
    for (int64_t i = 0; i < kept; i++) {
        before += (double)ranked[i].weight;
        if (ranked[i].weight > 0.0f) last = ranked[i].id;
        if (before > target) return ranked[i].id;
    }
    return last;
}
