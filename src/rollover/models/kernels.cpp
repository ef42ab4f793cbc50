// What a decoder does between its matmuls, the draw of a token, and two of training's passes over memory, on a CPU.
//
// Shapes: N tokens, E hidden size, I inner size of the MLP, H query heads, K key/value heads, G = H / K, D head size.
// T is float or bfloat16; all arithmetic is float32, summed in a fixed order for each token, whatever shares its batch.
// Compiled and bound by kernels.py.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels_attention.h"
#include "kernels_draw.h"
#include "kernels_numbers.h"

namespace {

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
                const float below = (widen(x[v]) - largest) * scale, weight = exponential(below);
                sum += weight;
                product += weight * std::max(below, -DEEPEST);
            }
            total += sum;
            weighted += product;
        }
        const double log_total = std::log(total);
        logprobs_C[c] = static_cast<float>((widen(x[targets_C[c]]) - largest) * scale - log_total);
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
    extern "C" void draw_##NAME(const T* logits, const float* scales, const int64_t* top_k, const float* top_p,       \
                                const float* min_p, const double* uniforms, int64_t* tokens, float* logprobs,         \
                                int64_t N, int64_t V, int threads) {                                                  \
        draw(logits, scales, top_k, top_p, min_p, uniforms, tokens, logprobs, N, V, threads);                         \
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
