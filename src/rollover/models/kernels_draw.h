// A token for each row of logits. Shapes: see kernels.cpp; V vocabulary.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels_numbers.h"

namespace {

struct Drawn {
    int64_t token;
    float logprob;
};

template <class T>
int64_t likeliest(const T* x, int64_t V, float largest) {
    const T* found = std::find_if(x, x + V, [&](T y) { return widen(y) == largest; });
    return found == x + V ? 0 : found - x;  // none: they are not numbers
}

// A token of softmax(x * scale), where its cumulative sum passes the uniform number. cumulative: one for each BLOCK.
template <class T>
Drawn draw_from_all(const T* x, int64_t V, float scale, double uniform, std::vector<double>& cumulative) {
    const float largest = maximum(x, V);
    double total = 0;
    cumulative.clear();
    for (int64_t start = 0; start < V; start += BLOCK)
        cumulative.push_back(total += weight_of(x + start, std::min(BLOCK, V - start), scale, largest));
    const double target = uniform * total;
    const int64_t b = std::min<int64_t>(
        std::upper_bound(cumulative.begin(), cumulative.end(), target) - cumulative.begin(), cumulative.size() - 1);
    const int64_t end = std::min(V, (b + 1) * BLOCK);
    double sum = b ? cumulative[b - 1] : 0;
    int64_t token = b * BLOCK;
    for (; token < end; token++) {
        sum += exponential((widen(x[token]) - largest) * scale);
        if (sum > target) break;
    }
    // Rounding at a block's edge could pass its end, or pick a token of probability 0: the likeliest instead.
    if (token == end || (widen(x[token]) - largest) * scale < -DEEPEST) token = likeliest(x, V, largest);
    return {token, (widen(x[token]) - largest) * scale - static_cast<float>(std::log(total))};
}

struct Candidate {
    float x;  // (its logit - the largest one) * scale
    int64_t token;
};

// What truncation leaves of softmax(x * scale), in the order of its tokens: of the top_k likeliest (0: of all) the
// fewest that have a share of top_p, and of those the ones at least min_p times as likely as the likeliest, which stays
// in any case. Of equally likely ones the first come first. Not the vocabulary is sorted but the tokens that have at
// least e^-4 of the likeliest's probability, or less if the truncation reaches further down.
template <class T>
void truncate(const T* x, int64_t V, float scale, int64_t top_k, float top_p, float min_p,
              std::vector<Candidate>& kept) {
    const float largest = maximum(x, V);
    double total = 0;
    if (top_k == 0 && top_p < 1)
        for (int64_t start = 0; start < V; start += BLOCK)
            total += weight_of(x + start, std::min(BLOCK, V - start), scale, largest);
    bool enough = false;
    for (float depth = 4; !enough; depth = std::min(2 * depth, DEEPEST)) {
        kept.clear();
        double mass = 0;
        for (int64_t start = 0; start < V; start += BLOCK) {
            const int64_t end = std::min(V, start + BLOCK);
            if ((maximum(x + start, end - start) - largest) * scale < -depth) continue;
            for (int64_t v = start; v < end; v++) {
                const float y = (widen(x[v]) - largest) * scale;
                if (!(y >= -depth)) continue;
                kept.push_back({y, v});
                mass += exponential(y);
            }
        }
        enough = depth == DEEPEST || (top_k > 0 && static_cast<int64_t>(kept.size()) >= top_k) ||
                 (top_k == 0 && top_p < 1 && mass >= top_p * total) ||
                 (min_p > 0 && exponential(-depth) <= min_p && (top_k == 0 || top_p == 1));
    }
    if (kept.empty()) kept.push_back({0, likeliest(x, V, largest)});  // they are not numbers
    std::sort(kept.begin(), kept.end(),
              [](const Candidate& a, const Candidate& b) { return a.x > b.x || (a.x == b.x && a.token < b.token); });
    if (top_k > 0 && static_cast<int64_t>(kept.size()) > top_k) kept.resize(top_k);
    if (top_p < 1) {
        if (top_k > 0)
            for (const Candidate& c : kept) total += exponential(c.x);
        double mass = 0;
        size_t left = 0;
        while (left < kept.size() && (left == 0 || mass < top_p * total)) mass += exponential(kept[left++].x);
        kept.resize(left);
    }
    while (kept.size() > 1 && exponential(kept.back().x) < min_p) kept.pop_back();
    std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
}

// One of these, where their cumulative sum passes the uniform number.
inline Drawn draw_from(const std::vector<Candidate>& kept, double uniform) {
    double total = 0, sum = 0;
    for (const Candidate& c : kept) total += exponential(c.x);
    size_t i = 0;
    while (i + 1 < kept.size() && (sum += exponential(kept[i].x)) <= uniform * total) i++;
    return {kept[i].token, kept[i].x - static_cast<float>(std::log(total))};
}

// A token and its log-prob for each row, from softmax(logits * scale), truncated. Scale 0: the likeliest, for certain.
template <class T>
void draw(const T* logits_NV, const float* scales_N, const int64_t* top_k_N, const float* top_p_N, const float* min_p_N,
          const double* uniforms_N, int64_t* tokens_N, float* logprobs_N, int64_t N, int64_t V, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<double> cumulative;
        std::vector<Candidate> kept;
#pragma omp for
        for (int64_t n = 0; n < N; n++) {
            const T* x = logits_NV + n * V;
            Drawn drawn{};
            if (scales_N[n] == 0) {
                drawn.token = likeliest(x, V, maximum(x, V));
            } else if (top_k_N[n] > 0 || top_p_N[n] < 1 || min_p_N[n] > 0) {
                truncate(x, V, scales_N[n], top_k_N[n], top_p_N[n], min_p_N[n], kept);
                drawn = draw_from(kept, uniforms_N[n]);
            } else {
                drawn = draw_from_all(x, V, scales_N[n], uniforms_N[n], cumulative);
            }
            tokens_N[n] = drawn.token;
            logprobs_N[n] = drawn.logprob;
        }
    }
}

}  // namespace
