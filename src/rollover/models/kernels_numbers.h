// float and bfloat16, exp, sums of it and softmax: what the kernels compute with.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }

inline void narrow(float x, float& out) { out = x; }
inline void narrow(float x, bf16& out) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);  // to nearest, ties to even
    out.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr float DEEPEST = 87.0f;  // what is less likely than the likeliest by e to this has probability 0

// exp by range reduction and a polynomial of degree 6 (Cephes' expf): relative error below 2e-7, and it vectorises.
// Below -DEEPEST, minus infinity included, it stays at 1.6e-38.
inline float exponential(float x) {
    x = std::min(std::max(x, -DEEPEST), 88.0f);
    const float n = __builtin_rintf(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * __builtin_bit_cast(float, (static_cast<int32_t>(n) + 127) << 23);
}

void softmax(float* row, int64_t count) {
    float peak = row[0], total = 0;
    for (int64_t t = 0; t < count; t++) peak = std::max(peak, row[t]);
#pragma omp simd reduction(+ : total)
    for (int64_t t = 0; t < count; t++) {
        row[t] = exponential(row[t] - peak);
        total += row[t];
    }
    const float share = 1.0f / total;
#pragma omp simd
    for (int64_t t = 0; t < count; t++) row[t] *= share;
}

constexpr int64_t BLOCK = 256;  // numbers summed in float32 before the sum goes on in float64

template <class T>
float maximum(const T* x, int64_t size) {
    float out = widen(x[0]);
#pragma omp simd reduction(max : out)
    for (int64_t i = 0; i < size; i++) out = std::max(out, widen(x[i]));
    return out;
}

// Sum of exp((x - largest) * scale): in this order, so that the largest one's weight is 1 at any scale.
template <class T>
float weight_of(const T* x, int64_t size, float scale, float largest) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += exponential((widen(x[i]) - largest) * scale);
    return sum;
}

}  // namespace
