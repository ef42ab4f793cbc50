// What a decoder does between its matmuls, the draw of a token, and two of training's passes over memory, on a CPU.
//
// Shapes: N tokens, E hidden size, I inner size of the MLP, H query heads, K key/value heads, G = H / K, D head size.
// T is float or bfloat16; all arithmetic is float32, summed in a fixed order for each token, whatever shares its batch.
// Compiled and bound by kernels.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

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

// exp by range reduction and a polynomial of degree 6 (Cephes' expf): relative error below 2e-7, and it vectorises.
// Below -87, minus infinity included, it stays at 1.6e-38.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
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

template <class T>
float inverse_rms(const T* x, int64_t size, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) {
        const float value = widen(x[i]);
        sum += value * value;
    }
    return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

// x += y (if given); out = x / rms(x) * weight; scales = 1 / rms(x) (if wanted).
template <class Y, class O>
void add_norm(float* x_NE, const Y* y_NE, const float* weight_E, float eps, O* out_NE, float* scales_N, int64_t N,
              int64_t E, int threads) {
#pragma omp parallel for num_threads(threads) if (N * E > 8192)
    for (int64_t n = 0; n < N; n++) {
        float* x = x_NE + n * E;
        O* out = out_NE + n * E;
        if (y_NE) {
            const Y* y = y_NE + n * E;
#pragma omp simd
            for (int64_t e = 0; e < E; e++) x[e] += widen(y[e]);
        }
        const float scale = inverse_rms(x, E, eps);
        if (scales_N) scales_N[n] = scale;
#pragma omp simd
        for (int64_t e = 0; e < E; e++) narrow(x[e] * scale * weight_E[e], out[e]);
    }
}

// One head: RMS norm if it has one, then rotation of its halves by the token's angles.
template <bool NORMED, class T>
void rotate_head(const T* in, const float* cos, const float* sin, const float* weight, float eps, T* out, int64_t D) {
    const int64_t half = D / 2;
    const float scale = NORMED ? inverse_rms(in, D, eps) : 1.0f;
#pragma omp simd
    for (int64_t d = 0; d < half; d++) {
        const float first = widen(in[d]) * (NORMED ? scale * weight[d] : 1.0f);
        const float second = widen(in[d + half]) * (NORMED ? scale * weight[d + half] : 1.0f);
        narrow(first * cos[d] - second * sin[d], out[d]);
        narrow(second * cos[d + half] + first * sin[d + half], out[d + half]);
    }
}

// Queries and keys of rows [H + K + K heads] with rotary positions, queries first.
template <class T>
void rotate(const T* qkv, const float* cos_ND, const float* sin_ND, const float* query_weight, const float* key_weight,
            float eps, T* query_NHD, T* key_NKD, int64_t N, int64_t H, int64_t K, int64_t D, int threads) {
#pragma omp parallel for num_threads(threads) if (N * (H + K) * D > 8192)
    for (int64_t n = 0; n < N; n++) {
        auto rotate_query = query_weight ? rotate_head<true, T> : rotate_head<false, T>;
        auto rotate_key = key_weight ? rotate_head<true, T> : rotate_head<false, T>;
        const T* row = qkv + n * (H + 2 * K) * D;
        const float *cos = cos_ND + n * D, *sin = sin_ND + n * D;
        for (int64_t h = 0; h < H; h++)
            rotate_query(row + h * D, cos, sin, query_weight, eps, query_NHD + (n * H + h) * D, D);
        for (int64_t k = 0; k < K; k++)
            rotate_key(row + (H + k) * D, cos, sin, key_weight, eps, key_NKD + (n * K + k) * D, D);
    }
}

// out = silu(gate) * up, of rows [gate, up]. silu is rounded to T, as the modules of the trainer do.
template <class T>
void silu_gate(const T* gate_up, T* out_NI, int64_t N, int64_t I, int threads) {
#pragma omp parallel for num_threads(threads) if (N * I > 8192)
    for (int64_t n = 0; n < N; n++) {
        const T *gate = gate_up + n * 2 * I, *up = gate + I;
        T* out = out_NI + n * I;
#pragma omp simd
        for (int64_t i = 0; i < I; i++) {
            const float x = widen(gate[i]);
            T silu;
            narrow(x / (1.0f + exponential(-x)), silu);
            narrow(widen(silu) * widen(up[i]), out[i]);
        }
    }
}

constexpr int LANES = 16;
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

template <class T>
inline void prefetch(const T* x, int64_t size) {
    for (size_t line = 0; line < size * sizeof(T); line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(x) + line);
}

// scores[g * stride + t] = query g . key t, of Q queries and `count` keys of C * LANES numbers: LANES keys at a time,
// whose products are folded into one vector of sums. The values are read next: fetched meanwhile.
template <class T, int C, int Q>
void scores_of(const lanes* query_QC, const T* keys, const T* values, int64_t count, float* scores, int64_t stride) {
    constexpr int D = C * LANES;
    for (int64_t start = 0; start < count; start += LANES) {
        lanes quarters[Q][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            lanes products[Q][4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const int64_t t = std::min(start + 4 * i + j, count - 1);  // beyond the last: the last again
                prefetch(values + t * D, D);
#pragma GCC unroll 8
                for (int c = 0; c < C; c += 2) {
                    lanes pair[2];
                    widen_pair(keys + t * D + c * LANES, pair);
#pragma GCC unroll 4
                    for (int g = 0; g < Q; g++) {
                        const lanes first = query_QC[g * C + c] * pair[0];
                        products[g][j] = c ? products[g][j] + first : first;
                        products[g][j] += query_QC[g * C + c + 1] * pair[1];
                    }
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < Q; g++)
                quarters[g][i] =
                    fold<2>(fold<1>(products[g][0], products[g][1]), fold<1>(products[g][2], products[g][3]));
        }
#pragma GCC unroll 4
        for (int g = 0; g < Q; g++) {
            const lanes all =
                fold<8>(fold<4>(quarters[g][0], quarters[g][1]), fold<4>(quarters[g][2], quarters[g][3]));
            std::memcpy(scores + g * stride + start, &all, sizeof all);
        }
    }
}

// out[g] = sum over t of scores[g * stride + t] * value t, 4 * LANES of its numbers at a time. What is read after it
// starts at `next`.
template <class T, int C, int Q>
void weighted_sum(const float* scores, int64_t stride, const T* values, int64_t count, const T* next, T* out) {
    for (int c0 = 0; c0 < C; c0 += 4) {
        lanes sums[Q][4] = {};
        for (int64_t t = 0; t < count; t++) {
            lanes value[4];
            prefetch(next + (t * C + c0) * LANES, 4 * LANES);
            widen_pair(values + (t * C + c0) * LANES, value);
            widen_pair(values + (t * C + c0 + 2) * LANES, value + 2);
#pragma GCC unroll 4
            for (int g = 0; g < Q; g++)
#pragma GCC unroll 4
                for (int c = 0; c < 4; c++) sums[g][c] += scores[g * stride + t] * value[c];
        }
        for (int g = 0; g < Q; g++)
            for (int c = 0; c < 4; c += 2) narrow_pair(sums[g] + c, out + (g * C + c0 + c) * LANES);
    }
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

// One query of any size.
template <class T>
void attend_any(const T* query_D, const T* keys, const T* values, int64_t count, float scale, float* scores, T* out_D,
                int64_t D) {
    for (int64_t t = 0; t < count; t++) {
        float total = 0;
        for (int64_t d = 0; d < D; d++) total += widen(query_D[d]) * scale * widen(keys[t * D + d]);
        scores[t] = total;
    }
    softmax(scores, count);
    std::vector<float> sums(D);
    for (int64_t t = 0; t < count; t++)
#pragma omp simd
        for (int64_t d = 0; d < D; d++) sums[d] += scores[t] * widen(values[t * D + d]);
    for (int64_t d = 0; d < D; d++) narrow(sums[d], out_D[d]);
}

// The G queries of one key/value head against `count` keys and values of D numbers each. C: D / LANES, or 0 if that is
// not known when compiling. scores: G * stride floats, stride at least `count` and a multiple of LANES.
template <class T, int C>
void attend_head(const T* query_GD, const T* keys, const T* values, int64_t count, float scale, float* scores,
                 int64_t stride, const T* next, T* out_GD, int64_t G, int64_t D) {
    if constexpr (C > 0) {
        for (int64_t g = 0; g < G;) {  // as many queries at a time as registers hold
            auto go = [&]<int Q>() {
                lanes query[Q * C];
                for (int i = 0; i < Q * C; i += 2) {
                    widen_pair(query_GD + g * D + i * LANES, query + i);
                    query[i] *= scale;
                    query[i + 1] *= scale;
                }
                scores_of<T, C, Q>(query, keys, values, count, scores, stride);
                for (int i = 0; i < Q; i++) softmax(scores + i * stride, count);
                weighted_sum<T, C, Q>(scores, stride, values, count, next, out_GD + g * D);
                g += Q;
            };
            const int64_t left = G - g;
            if (left >= 4)
                go.template operator()<4>();
            else if (left == 3)
                go.template operator()<3>();
            else if (left == 2)
                go.template operator()<2>();
            else
                go.template operator()<1>();
        }
    } else {
        for (int64_t g = 0; g < G; g++)
            attend_any(query_GD + g * D, keys, values, count, scale, scores, out_GD + g * D, D);
    }
}

// The key and value of each token go to position `positions[n]` of its sequence's cached rows ([K, row length, D], heads
// `head_strides[n]` numbers apart). Then its queries attend to all up to there, or to the last `window` of them (0: all).
template <class T>
void cached_attention(const T* query_NHD, const T* key_NKD, const T* value, int64_t value_stride, T* const* key_rows,
                      T* const* value_rows, const int64_t* head_strides, const int64_t* positions, int64_t window,
                      float scale, T* out_NHD, int64_t N, int64_t H, int64_t K, int64_t D, int threads) {
    const int64_t G = H / K, tasks = N * K;
    const auto attend = D == 64 ? attend_head<T, 4> : D == 128 ? attend_head<T, 8> : attend_head<T, 0>;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t n = task / K, k = task % K, place = k * head_strides[n] + positions[n] * D;
            std::copy_n(key_NKD + task * D, D, key_rows[n] + place);
            std::copy_n(value + n * value_stride + k * D, D, value_rows[n] + place);
        }
        std::vector<float> scores;
#pragma omp for schedule(dynamic, std::clamp<int64_t>(tasks / (8 * threads), 1, 16))
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t n = task / K, k = task % K, last = positions[n];
            const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0, count = last + 1 - first;
            const int64_t stride = (count + LANES - 1) / LANES * LANES;
            if (static_cast<int64_t>(scores.size()) < G * stride) scores.resize(2 * G * stride);
            const int64_t start = k * head_strides[n] + first * D, queries = (n * H + k * G) * D;
            const int64_t m = std::min(task + 1, tasks - 1) / K;
            attend(query_NHD + queries, key_rows[n] + start, value_rows[n] + start, count, scale, scores.data(), stride,
                   key_rows[m] + (task + 1) % K * head_strides[m], out_NHD + queries, G, D);
        }
    }
}

constexpr int64_t BLOCK = 256;  // numbers summed in float32 before the sum goes on in float64

template <class T>
float maximum(const T* x, int64_t size) {
    float out = widen(x[0]);
#pragma omp simd reduction(max : out)
    for (int64_t i = 0; i < size; i++) out = std::max(out, widen(x[i]));
    return out;
}

// Sum of exp(x * scale - peak).
template <class T>
float weight_of(const T* x, int64_t size, float scale, float peak) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += exponential(widen(x[i]) * scale - peak);
    return sum;
}

// A token of softmax(logits * scale) for each row, where its cumulative sum passes the row's uniform number, and its
// log-prob.
template <class T>
void draw(const T* logits_NV, const float* scales_N, const double* uniforms_N, int64_t* tokens_N, float* logprobs_N,
          int64_t N, int64_t V, int threads) {
    const int64_t blocks = (V + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads)
    {
        std::vector<double> cumulative(blocks);
#pragma omp for
        for (int64_t n = 0; n < N; n++) {
            const T* x = logits_NV + n * V;
            const float scale = scales_N[n];
            const float largest = maximum(x, V);
            const float peak = largest * scale;
            double total = 0;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t start = b * BLOCK;
                total += weight_of(x + start, std::min(BLOCK, V - start), scale, peak);
                cumulative[b] = total;
            }
            const double target = uniforms_N[n] * total;
            const int64_t b = std::min<int64_t>(
                std::upper_bound(cumulative.begin(), cumulative.end(), target) - cumulative.begin(), blocks - 1);
            const int64_t end = std::min(V, (b + 1) * BLOCK);
            double sum = b ? cumulative[b - 1] : 0;
            int64_t token = b * BLOCK;
            for (; token < end; token++) {
                sum += exponential(widen(x[token]) * scale - peak);
                if (sum > target) break;
            }
            // Rounding at a block's edge could pass its end, or pick a token of probability 0: the likeliest instead.
            if (token == end || widen(x[token]) * scale - peak < -87.0f)
                token = std::find_if(x, x + V, [&](T y) { return widen(y) == largest; }) - x;
            tokens_N[n] = token;
            logprobs_N[n] = widen(x[token]) * scale - peak - static_cast<float>(std::log(total));
        }
    }
}

// Log-prob of the target, entropy and log Z of softmax(logits * scale), for each of C rows.
template <class T>
void logprobs(const T* logits_CV, const int64_t* targets_C, const float* scales_C, float* logprobs_C, float* entropy_C,
              float* log_z_C, int64_t C, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t c = 0; c < C; c++) {
        const T* x = logits_CV + c * V;
        const float scale = scales_C[c];
        const float largest = maximum(x, V);
        const float peak = largest * scale;
        double total = 0, weighted = 0;
        for (int64_t start = 0; start < V; start += BLOCK) {
            const int64_t end = std::min(V, start + BLOCK);
            float sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
            for (int64_t v = start; v < end; v++) {
                const float below = widen(x[v]) * scale - peak, weight = exponential(below);
                sum += weight;
                product += weight * std::max(below, -87.0f);
            }
            total += sum;
            weighted += product;
        }
        const double log_total = std::log(total);
        logprobs_C[c] = static_cast<float>(widen(x[targets_C[c]]) * scale - peak - log_total);
        entropy_C[c] = static_cast<float>(log_total - weighted / total);
        log_z_C[c] = static_cast<float>(peak + log_total);
    }
}

// Their gradient in place: logits <- grad * scale * (onehot(target) - softmax(logits * scale)).
template <class T>
void logprobs_backward(T* logits_CV, const int64_t* targets_C, const float* scales_C, const float* log_z_C,
                       const float* grads_C, int64_t C, int64_t V, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t c = 0; c < C; c++) {
        T* x = logits_CV + c * V;
        const float scale = scales_C[c], log_z = log_z_C[c], factor = grads_C[c] * scale;
        const float target = exponential(widen(x[targets_C[c]]) * scale - log_z);
#pragma omp simd
        for (int64_t v = 0; v < V; v++) narrow(-factor * exponential(widen(x[v]) * scale - log_z), x[v]);
        narrow(factor * (1.0f - target), x[targets_C[c]]);
    }
}

// With s = 1 / rms(x) and w the weight: dx = s w dy - x s^3 mean(w dy x), dw = sum over tokens of dy x s.
// grad_weight: E floats for each thread, summed by the caller.
template <class O>
void norm_backward(const O* grad_NE, const float* x_NE, const float* weight_E, const float* scales_N,
                   float* grad_x_NE, float* grad_weight, int64_t N, int64_t E, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < threads; part++) {
        float* dw = grad_weight + part * E;
        for (int64_t n = N * part / threads; n < N * (part + 1) / threads; n++) {
            const O* dy = grad_NE + n * E;
            const float *x = x_NE + n * E, s = scales_N[n];
            float* dx = grad_x_NE + n * E;
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t e = 0; e < E; e++) {
                const float g = widen(dy[e]);
                dot += g * weight_E[e] * x[e];
                dw[e] += g * x[e] * s;
            }
            const float shrink = dot * s * s * s / static_cast<float>(E);
#pragma omp simd
            for (int64_t e = 0; e < E; e++) dx[e] = widen(dy[e]) * weight_E[e] * s - x[e] * shrink;
        }
    }
}

}  // namespace

#define EXPORT(T, NAME)                                                                                               \
    extern "C" void add_norm_##NAME(float* x, const T* y, const float* w, float eps, T* out, float* scales,           \
                                    int64_t N, int64_t E, int threads) {                                              \
        add_norm(x, y, w, eps, out, scales, N, E, threads);                                                           \
    }                                                                                                                 \
    extern "C" void last_norm_##NAME(float* x, const T* y, const float* w, float eps, float* out, float* scales,      \
                                     int64_t N, int64_t E, int threads) {                                             \
        add_norm(x, y, w, eps, out, scales, N, E, threads);                                                           \
    }                                                                                                                 \
    extern "C" void rotate_##NAME(const T* qkv, const float* cos, const float* sin, const float* qw, const float* kw, \
                                  float eps, T* q, T* k, int64_t N, int64_t H, int64_t K, int64_t D, int threads) {   \
        rotate(qkv, cos, sin, qw, kw, eps, q, k, N, H, K, D, threads);                                                \
    }                                                                                                                 \
    extern "C" void silu_gate_##NAME(const T* gate_up, T* out, int64_t N, int64_t I, int threads) {                   \
        silu_gate(gate_up, out, N, I, threads);                                                                       \
    }                                                                                                                 \
    extern "C" void cached_attention_##NAME(                                                                          \
        const T* q, const T* k, const T* v, int64_t v_stride, T* const* key_rows, T* const* value_rows,               \
        const int64_t* head_strides, const int64_t* positions, int64_t window, float scale, T* out, int64_t N,        \
        int64_t H, int64_t K, int64_t D, int threads) {                                                               \
        cached_attention(q, k, v, v_stride, key_rows, value_rows, head_strides, positions, window, scale, out, N, H,  \
                         K, D, threads);                                                                              \
    }                                                                                                                 \
    extern "C" void draw_##NAME(const T* logits, const float* scales, const double* uniforms, int64_t* tokens,        \
                                float* logprobs, int64_t N, int64_t V, int threads) {                                 \
        draw(logits, scales, uniforms, tokens, logprobs, N, V, threads);                                              \
    }                                                                                                                 \
    extern "C" void logprobs_##NAME(const T* logits, const int64_t* targets, const float* scales, float* out,         \
                                    float* entropy, float* log_z, int64_t C, int64_t V, int threads) {                \
        logprobs(logits, targets, scales, out, entropy, log_z, C, V, threads);                                        \
    }                                                                                                                 \
    extern "C" void logprobs_backward_##NAME(T* logits, const int64_t* targets, const float* scales,                  \
                                             const float* log_z, const float* grads, int64_t C, int64_t V,            \
                                             int threads) {                                                           \
        logprobs_backward(logits, targets, scales, log_z, grads, C, V, threads);                                      \
    }                                                                                                                 \
    extern "C" void norm_backward_##NAME(const T* grad, const float* x, const float* w, const float* scales,          \
                                         float* grad_x, float* grad_w, int64_t N, int64_t E, int threads) {           \
        norm_backward(grad, x, w, scales, grad_x, grad_w, N, E, threads);                                             \
    }
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
