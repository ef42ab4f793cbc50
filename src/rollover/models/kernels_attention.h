// Attention of new tokens to what is cached of their sequences, in rows that are read up to the token and no further.
// Shapes: see kernels.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels_numbers.h"

namespace {

// Numbers in a register: of wider vectors the compiler keeps nothing in registers.
#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t bit_lanes __attribute__((vector_size(4 * LANES)));

// 2 * LANES numbers as two vectors: of bf16 the even and the odd ones, which takes two operations.
inline void widen_pair(const float* x, lanes* out) { std::memcpy(out, x, 2 * sizeof(lanes)); }
inline void widen_pair(const bf16* x, lanes* out) {
    bit_lanes bits;
    std::memcpy(&bits, x, sizeof bits);
    out[0] = __builtin_bit_cast(lanes, bits << 16);
    out[1] = __builtin_bit_cast(lanes, bits & 0xffff0000u);
}
inline void narrow_pair(const lanes* x, float* out) { std::memcpy(out, x, 2 * sizeof(lanes)); }
inline void narrow_pair(const lanes* x, bf16* out) {
    bit_lanes even = __builtin_bit_cast(bit_lanes, x[0]), odd = __builtin_bit_cast(bit_lanes, x[1]);
    even += 0x7fff + ((even >> 16) & 1);  // to nearest, ties to even
    odd += 0x7fff + ((odd >> 16) & 1);
    const bit_lanes bits = (even >> 16) | (odd & 0xffff0000u);
    std::memcpy(out, &bits, sizeof bits);
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, bit_lanes{__VA_ARGS__})
#endif

// Sums of numbers at distance W: of a where the lane's number has no bit W, of b where it has.
template <int W, uint32_t... I>
inline lanes fold(lanes a, lanes b, std::integer_sequence<uint32_t, I...>) {
    return SHUFFLE(a, b, (I & W ? LANES + I : I)...) + SHUFFLE(a, b, (I & W ? LANES + (I ^ W) : I ^ W)...);
}
template <int W>
inline lanes fold(lanes a, lanes b) {
    return fold<W>(a, b, std::make_integer_sequence<uint32_t, LANES>());
}

// Of LANES vectors whose neighbours were folded already (x[i]: of 2i and 2i + 1), one vector of their sums.
template <int W = LANES / 2>
inline lanes fold_all(const lanes* x) {
    if constexpr (W == 1)
        return x[0];
    else
        return fold<W>(fold_all<W / 2>(x), fold_all<W / 2>(x + W / 2));
}

// scores[g * stride + t] = query g . key t, of Q queries and `count` keys of D = C * LANES numbers: LANES keys at a
// time, whose products are folded into one vector of sums. The values are read next: fetched meanwhile.
template <class T, int Q, int SIZE>
void scores_of(const lanes* query_CQ, const T* keys, const T* values, int64_t count, float* scores, int64_t stride,
               int64_t size) {
    const int64_t D = SIZE ? SIZE : size;
    for (int64_t start = 0; start < count; start += LANES) {
        lanes pairs[Q][LANES / 2];
        for (int i = 0; i < LANES / 2; i++) {
            lanes products[Q][2] = {};
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
                const int64_t t = std::min(start + 2 * i + j, count - 1);  // beyond the last: the last again
                for (size_t line = 0; line < static_cast<size_t>(D) * sizeof(T); line += 64)
                    __builtin_prefetch(reinterpret_cast<const char*>(values + t * D) + line);
#pragma GCC unroll 8
                for (int64_t c = 0; c < D / LANES; c += 2) {
                    lanes key[2];
                    widen_pair(keys + t * D + c * LANES, key);
#pragma GCC unroll 4
                    for (int g = 0; g < Q; g++) {
                        products[g][j] += query_CQ[c * Q + g] * key[0];
                        products[g][j] += query_CQ[(c + 1) * Q + g] * key[1];
                    }
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < Q; g++) pairs[g][i] = fold<1>(products[g][0], products[g][1]);
        }
        for (int g = 0; g < Q; g++) {
            const lanes all = fold_all(pairs[g]);
            std::memcpy(scores + g * stride + start, &all, sizeof all);
        }
    }
}

// out[g] = sum over t of scores[g * stride + t] * value t, B * LANES of its numbers at a time.
template <class T, int Q, int SIZE, int B>
void weighted_sum(const float* scores, int64_t stride, const T* values, int64_t count, T* out, int64_t size) {
    const int64_t D = SIZE ? SIZE : size;
    for (int64_t start = 0; start < D; start += B * LANES) {
        lanes sums[Q][B] = {};
        for (int64_t t = 0; t < count; t++) {
            lanes value[B];
            for (int c = 0; c < B; c += 2) widen_pair(values + t * D + start + c * LANES, value + c);
#pragma GCC unroll 4
            for (int g = 0; g < Q; g++)
#pragma GCC unroll 4
                for (int c = 0; c < B; c++) sums[g][c] += scores[g * stride + t] * value[c];
        }
        for (int g = 0; g < Q; g++)
            for (int c = 0; c < B; c += 2) narrow_pair(sums[g] + c, out + g * D + start + c * LANES);
    }
}

// The G queries of one key/value head against `count` keys and values of D numbers each: SIZE if that is known when
// compiling, else 0. scores: stride floats for each of up to 4 queries, stride at least `count` and a multiple
// of LANES; work: 4 * D floats.
template <class T, int SIZE>
void attend_head(const T* query_GD, const T* keys, const T* values, int64_t count, float scale, float* scores,
                 int64_t stride, lanes* work, T* out_GD, int64_t G, int64_t size) {
    const int64_t D = SIZE ? SIZE : size;
    for (int64_t g = 0; g < G;) {
        auto attend = [&]<int Q>() {
            for (int i = 0; i < Q; i++)
                for (int64_t c = 0; c < D / LANES; c += 2) {
                    lanes pair[2];
                    widen_pair(query_GD + (g + i) * D + c * LANES, pair);
                    work[c * Q + i] = pair[0] * scale;
                    work[(c + 1) * Q + i] = pair[1] * scale;
                }
            scores_of<T, Q, SIZE>(work, keys, values, count, scores, stride, D);
            for (int i = 0; i < Q; i++) softmax(scores + i * stride, count);
            if (D % (4 * LANES) == 0)
                weighted_sum<T, Q, SIZE, 4>(scores, stride, values, count, out_GD + g * D, D);
            else
                weighted_sum<T, Q, SIZE, 2>(scores, stride, values, count, out_GD + g * D, D);
            g += Q;
        };
        const int64_t left = G - g;  // as many at a time as registers hold
        if (left >= 4)
            attend.template operator()<4>();
        else if (left == 3)
            attend.template operator()<3>();
        else if (left == 2)
            attend.template operator()<2>();
        else
            attend.template operator()<1>();
    }
}

// The same for a D that is no multiple of 2 * LANES.
template <class T>
void attend_any_head(const T* query_GD, const T* keys, const T* values, int64_t count, float scale, float* scores,
                     int64_t, lanes*, T* out_GD, int64_t G, int64_t D) {
    std::vector<float> sums(D);
    for (int64_t g = 0; g < G; g++) {
        for (int64_t t = 0; t < count; t++) {
            float total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t d = 0; d < D; d++) total += widen(query_GD[g * D + d]) * widen(keys[t * D + d]);
            scores[t] = total * scale;
        }
        softmax(scores, count);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t t = 0; t < count; t++)
#pragma omp simd
            for (int64_t d = 0; d < D; d++) sums[d] += scores[t] * widen(values[t * D + d]);
        for (int64_t d = 0; d < D; d++) narrow(sums[d], out_GD[g * D + d]);
    }
}

// The key and value of each token go to position `positions[n]` of its sequence's cached rows ([K, row length, D],
// heads `head_strides[n]` numbers apart). Then its queries attend to all up to there, or to the last `window` (0: all).
template <class T>
void cached_attention(const T* query_NHD, const T* key_NKD, const T* value, int64_t value_stride, T* const* key_rows,
                      T* const* value_rows, const int64_t* head_strides, const int64_t* positions, int64_t window,
                      float scale, T* out_NHD, int64_t N, int64_t H, int64_t K, int64_t D, int threads) {
    const int64_t G = H / K, tasks = N * K;
    auto attend = D % (2 * LANES) == 0 ? attend_head<T, 0> : attend_any_head<T>;
    if (D == 64) attend = attend_head<T, 64>;
    if (D == 128) attend = attend_head<T, 128>;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t n = task / K, k = task % K, place = k * head_strides[n] + positions[n] * D;
            std::copy_n(key_NKD + task * D, D, key_rows[n] + place);
            std::copy_n(value + n * value_stride + k * D, D, value_rows[n] + place);
        }
        std::vector<float> scores;
        std::vector<lanes> work(4 * D / LANES);
#pragma omp for schedule(dynamic, std::clamp<int64_t>(tasks / (8 * threads), 1, 16))
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t n = task / K, k = task % K, last = positions[n];
            const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0, count = last + 1 - first;
            const int64_t stride = (count + LANES - 1) / LANES * LANES;
            if (static_cast<int64_t>(scores.size()) < 4 * stride) scores.resize(8 * stride);
            const int64_t start = k * head_strides[n] + first * D, queries = (n * H + k * G) * D;
            attend(query_NHD + queries, key_rows[n] + start, value_rows[n] + start, count, scale, scores.data(), stride,
                   work.data(), out_NHD + queries, G, D);
        }
    }
}

}  // namespace
