// The fence of a one-sided writer, and the copy under it. kv_transfer/fence.py sees these functions; nothing else does.
//
// A slot stands in memory that the owner of a pool and one writer share. The owner grants by storing a generation and
// revokes by storing 0; the writer names in `window` what it is writing, before it looks at the generation:
//
//     writer   window = w;   full barrier;   generation == mine ?  copy  :  nothing;   window = 0
//     owner    generation = 0;   full barrier;   window == 0 ?  reuse at once  :  what w names is in quarantine
//
// Both orders of the two stores end well: either the owner sees w, or the writer sees 0 (Dekker). A window that is 0
// once after a revoke proves that nothing is written under that generation any more: a later one meets 0 and copies
// nothing.
#include <atomic>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define BATON_EXPORT __attribute__((visibility("default")))

namespace {

struct alignas(64) Slot {
    std::atomic<uint64_t> generation;
    std::atomic<uint64_t> window;
};
static_assert(sizeof(Slot) == 64, "kv_transfer/fence.py counts on a cache line a slot");
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a lock would be private to one process");

// `outer` x `inner` rows of `row_bytes`. Offsets and strides in bytes, from the bases of the two pools.
struct Copy {
    int64_t source, target, row_bytes, inner, outer;
    int64_t source_inner, target_inner, source_outer, target_outer;
    int64_t window;
};

constexpr int64_t kWindowBytes = 1 << 20;

bool enter(Slot *slot, uint64_t generation, uint64_t window) {
    slot->window.exchange(window, std::memory_order_seq_cst);
    if (slot->generation.load(std::memory_order_seq_cst) == generation) return true;
    slot->window.store(0, std::memory_order_release);
    return false;
}

void leave(Slot *slot) { slot->window.store(0, std::memory_order_release); }

// Past this a copy does not fit the caches: its stores go around them, as memcpy's do from a similar size on. Rows of a
// block are too small for memcpy to see it.
constexpr int64_t kStreamBytes = 16 << 20;
constexpr int64_t kStreamRow = 4096;

void copy_row(char *to, const char *from, int64_t num_bytes, bool is_stream) {
#if defined(__x86_64__)
    if (is_stream && num_bytes >= kStreamRow) {
        const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63);
        std::memcpy(to, from, static_cast<size_t>(head));
        int64_t at = head;
        for (; at + 64 <= num_bytes; at += 64) {
            const __m128i *in = reinterpret_cast<const __m128i *>(from + at);
            __m128i *out = reinterpret_cast<__m128i *>(to + at);
            _mm_prefetch(from + at + 512, _MM_HINT_NTA);
            const __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2),
                          d = _mm_loadu_si128(in + 3);
            _mm_stream_si128(out, a);
            _mm_stream_si128(out + 1, b);
            _mm_stream_si128(out + 2, c);
            _mm_stream_si128(out + 3, d);
        }
        std::memcpy(to + at, from + at, static_cast<size_t>(num_bytes - at));
        _mm_sfence();  // before the window closes
        return;
    }
#else
    (void)is_stream;
#endif
    std::memcpy(to, from, static_cast<size_t>(num_bytes));
}

}  // namespace

extern "C" {

BATON_EXPORT int64_t baton_fence_version(void) { return 1; }

BATON_EXPORT void baton_fence_grant(Slot *slot, uint64_t generation) {
    slot->generation.store(generation, std::memory_order_seq_cst);
}

// The window that is open at this moment, 0 where none is.
BATON_EXPORT uint64_t baton_fence_revoke(Slot *slot) {
    slot->generation.exchange(0, std::memory_order_seq_cst);
    return slot->window.load(std::memory_order_seq_cst);
}

BATON_EXPORT uint64_t baton_fence_window(Slot *slot) { return slot->window.load(std::memory_order_seq_cst); }

BATON_EXPORT int64_t baton_fence_enter(Slot *slot, uint64_t generation, uint64_t window) {
    return enter(slot, generation, window);
}

BATON_EXPORT void baton_fence_leave(Slot *slot) { leave(slot); }

// Copies in windows of at most 1 MiB. Returns 1, or 0 where the generation is revoked: what was left is not written.
BATON_EXPORT int64_t baton_fence_copy(
    Slot *slot, uint64_t generation, const Copy *copies, int64_t num_copies, const char *source, char *target
) {
    int64_t total = 0;
    for (const Copy *copy = copies; copy != copies + num_copies; ++copy) {
        total += copy->row_bytes * copy->inner * copy->outer;
    }
    const bool is_stream = total >= kStreamBytes;
    for (const Copy *copy = copies; copy != copies + num_copies; ++copy) {
        int64_t left = 0;  // bytes that the open window still takes
        for (int64_t o = 0; o < copy->outer; ++o) {
            for (int64_t i = 0; i < copy->inner; ++i) {
                const char *from = source + copy->source + o * copy->source_outer + i * copy->source_inner;
                char *to = target + copy->target + o * copy->target_outer + i * copy->target_inner;
                for (int64_t done = 0; done < copy->row_bytes;) {
                    if (left == 0) {
                        if (o + i + done > 0) leave(slot);
                        if (!enter(slot, generation, static_cast<uint64_t>(copy->window))) return 0;
                        left = kWindowBytes;
                    }
                    const int64_t rest = copy->row_bytes - done, part = rest < left ? rest : left;
                    copy_row(to + done, from + done, part, is_stream);
                    done += part;
                    left -= part;
                }
            }
        }
        leave(slot);
    }
    return 1;
}

}  // extern "C"
