// The machine's limits as Baton's kernels meet them: `limits read BYTES THREADS` prints GB/s of streaming reads over that
// many bytes in huge pages, each thread its own part again and again; `limits int8 THREADS` prints Gop/s of 8-bit dot
// products in registers (two per multiply and add), 0 where this processor has none. Built with -march=native, no torch.
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr double SECONDS = 0.4;
constexpr size_t HUGE = size_t(2) << 20;
volatile int64_t sink;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

#if defined(__AVX512F__)
int64_t read_all(const uint8_t *data, size_t bytes) {
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i + 256 <= bytes; i += 256) {
        a = _mm512_xor_si512(a, _mm512_load_si512(data + i));
        b = _mm512_xor_si512(b, _mm512_load_si512(data + i + 64));
        c = _mm512_xor_si512(c, _mm512_load_si512(data + i + 128));
        d = _mm512_xor_si512(d, _mm512_load_si512(data + i + 192));
    }
    return _mm512_reduce_add_epi64(_mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d)));
}
#else
int64_t read_all(const uint8_t *data, size_t bytes) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i + 64 <= bytes; i += 64)
        for (int lane = 0; lane < 8; lane++) sums[lane] ^= reinterpret_cast<const uint64_t *>(data + i)[lane];
    return (int64_t)(sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7]);
}
#endif

#if defined(__AVX512VNNI__)
using Lanes = __m512i;
Lanes dot(Lanes sum, Lanes a, Lanes b) { return _mm512_dpbusd_epi32(sum, a, b); }
Lanes fill(int n) { return _mm512_set1_epi32(n); }
#define HAS_DOT 1
#elif defined(__AVXVNNI__)
using Lanes = __m256i;
Lanes dot(Lanes sum, Lanes a, Lanes b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
Lanes fill(int n) { return _mm256_set1_epi32(n); }
#define HAS_DOT 1
#endif

#ifdef HAS_DOT
constexpr int SUMS = 20;  // independent, more than latency times throughput
double count_dots(Clock::time_point start) {
    Lanes sums[SUMS], a = fill(0x01020304), b = fill(0x04030201);
    for (int i = 0; i < SUMS; i++) sums[i] = fill(i);
    double rounds = 0;
    while (seconds_since(start) < SECONDS) {
        for (int round = 0; round < 20000; round++) {
#pragma GCC unroll 20
            for (int i = 0; i < SUMS; i++) sums[i] = dot(sums[i], a, b);
            asm volatile("" : "+x"(a), "+x"(b));
        }
        rounds += 20000;
    }
    int32_t out[sizeof(Lanes) / 4];
    for (int i = 0; i < SUMS; i++) {
        memcpy(out, &sums[i], sizeof out);
        sink = sink + out[0];
    }
    return rounds * SUMS * sizeof(Lanes) * 2;
}
#endif

template <typename Work>
double run_threads(int threads, Work work) {
    std::atomic<int> ready{0};
    std::vector<double> done(threads);
    std::vector<std::thread> all;
    for (int t = 0; t < threads; t++)
        all.emplace_back([&, t] {
            ready++;
            while (ready < threads) {}
            const auto start = Clock::now();
            const double amount = work(t, start);
            done[t] = amount / seconds_since(start);
        });
    double sum = 0;
    for (int t = 0; t < threads; t++) {
        all[t].join();
        sum += done[t];
    }
    return sum;
}

double read_rate(size_t bytes, int threads) {
    const size_t rounded = (bytes + HUGE - 1) / HUGE * HUGE;
    auto *data = static_cast<uint8_t *>(aligned_alloc(HUGE, rounded));
    if (!data) return 0;
    madvise(data, rounded, MADV_HUGEPAGE);
    memset(data, 3, rounded);
    const size_t part = bytes / threads / 256 * 256;
    const double rate = run_threads(threads, [&](int t, Clock::time_point start) {
        double read = 0;
        int64_t sum = 0;
        while (seconds_since(start) < SECONDS) {
            sum ^= read_all(data + t * part, part);
            read += (double)part;
        }
        sink = sum;
        return read;
    });
    free(data);
    return rate / 1e9;
}

}  // namespace

int main(int count, char **arguments) {
    if (count == 4 && !strcmp(arguments[1], "read")) {
        printf("%.3f\n", read_rate(strtoull(arguments[2], nullptr, 10), atoi(arguments[3])));
        return 0;
    }
    if (count == 3 && !strcmp(arguments[1], "int8")) {
#ifdef HAS_DOT
        printf("%.3f\n", run_threads(atoi(arguments[2]), [](int, Clock::time_point start) { return count_dots(start); }) / 1e9);
#else
        printf("0\n");
#endif
        return 0;
    }
    fprintf(stderr, "usage: limits read BYTES THREADS | limits int8 THREADS\n");
    return 2;
}
