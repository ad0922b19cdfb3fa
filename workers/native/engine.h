// An engine: the kernels of one level, its threads and their scratch; and the buffers that grow with the work.
#pragma once
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "abi.h"
#include "kernels.h"
#include "pool.h"

namespace baton {

constexpr int64_t ROWS_PER_PASS = 256;  // what is read and written of them stays in the second cache

// Memory that keeps what it holds no longer than until it grows. In huge pages where the system gives them: reading
// weights through 4 KiB pages costs half the bandwidth and more.
class Buffer {
public:
    Buffer() = default;
    ~Buffer();
    Buffer(Buffer &&other) noexcept;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    void reserve(int64_t bytes);    // throws std::bad_alloc
    int64_t size() const { return size_; }

    template <class T>
    T *as() const {
        return static_cast<T *>(data_);
    }

private:
    void *data_ = nullptr;
    int64_t size_ = 0;
};

// Weights one behind the other in pieces of huge pages: most matrices are smaller than one page. A piece lives as long
// as a matrix in it.
class Arena {
public:
    struct Place {
        std::shared_ptr<Buffer> piece;
        uint8_t *data = nullptr;
    };

    Place take(int64_t bytes);      // throws std::bad_alloc

private:
    std::shared_ptr<Buffer> piece_;
    int64_t used_ = 0;
};

struct RoundedBuffers {
    Buffer q, scale, scaled_sum, offset;

    // Room for `rows` rows of `k` inputs each.
    void reserve(int64_t rows, int64_t k);
    Activations view(const float *x, int64_t k) const;
};

// The part of `count` things that thread `thread` of `num_threads` does.
inline Range share_of(int64_t count, int thread, int num_threads) {
    return {count * thread / num_threads, count * (thread + 1) / num_threads};
}

// Whether every index of a step lies inside what it indexes.
bool are_sound(const BatonTables &tables, const BatonAttention &attention, const BatonCache &cache);

std::vector<AttentionUnit> plan_units(const BatonTables &tables, const BatonAttention &attention);
AttentionUnit plan_unit(const BatonTables &tables, int64_t row, int64_t kv_head, int64_t out);

// The cache of one layer, out of that of all.
BatonCache cache_of(const BatonCache &all, const BatonAttention &attention, int64_t layer);

int64_t longest_context(const BatonTables &tables);

}  // namespace baton

struct BatonMatrix {
    baton::Matrix view;
    baton::Arena::Place place;
    baton::Buffer scale;
};

struct BatonEngine {
    BatonEngine(const baton::Kernels &k, int num_threads) : kernels(k), pool(num_threads), scratch(num_threads) {}

    const baton::Kernels &kernels;
    baton::Pool pool;
    std::vector<baton::Buffer> scratch;     // one per thread
    baton::RoundedBuffers rounded;
    baton::Arena arena;

    void reserve_scratch(int64_t bytes);

    // What one thread does of a stage; a stage ends at the pool's barrier.
    void linear(int thread, const baton::LinearJob &job, int64_t num_rows);
    void rotate_and_store(const BatonAttention &attention, const BatonTables &tables, const BatonCache &cache,
                          int64_t row, float *qkv) const;
    // The same of one KV head and the queries that share it.
    void rotate_group(const BatonAttention &attention, const BatonTables &tables, const BatonCache &cache, int64_t row,
                      int64_t kv_head, float *qkv) const;
    void attend(int thread, const baton::AttentionJob &job, const std::vector<baton::AttentionUnit> &units,
                std::atomic<int64_t> &next);
};
