// The floor of a training step on a CPU: each row is read, updated and written once, by
// as many threads as there are cores. Duplicates are not merged, so this is a bound on
// the time of a step, not a step. Built and called by step.py.

#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int kAhead = 16;  // rows that are fetched ahead of their use

template <typename Update>
void for_rows(const int32_t* ids, int64_t n, int64_t width, float* const* tables,
              int num_tables, int threads, Update update) {
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([=] {
      const int64_t end = n * (t + 1) / threads;
      for (int64_t i = n * t / threads; i < end; ++i) {
        if (i + kAhead < end)
          for (int k = 0; k < num_tables; ++k)
            for (int64_t j = 0; j < width; j += 16)
              __builtin_prefetch(tables[k] + ids[i + kAhead] * width + j, 1);
        update(i, int64_t{ids[i]} * width);
      }
    });
  }
  for (auto& thread : pool) thread.join();
}

float slope(const float* row, const float* weights, float clicked, int64_t width) {
  float logit = 0;
  for (int64_t j = 0; j < width; ++j) logit += row[j] * weights[j];
  return 1 / (1 + std::exp(-logit)) - clicked;
}

}  // namespace

// kind: 0 SGD, 1 Adagrad, 2 Adam, 3 Adagrad with a number for each row.
extern "C" void step(int kind, const int32_t* ids, const float* clicked, int64_t n,
                     int64_t width, const float* weights, float* table, float* first,
                     float* second, int threads) {
  float* tables[] = {table, first, second};
  const float scale = 1.0f / n, rate = 1e-3f;
  if (kind == 0) {
    for_rows(ids, n, width, tables, 1, threads, [=](int64_t i, int64_t at) {
      float* row = table + at;
      const float g = scale * slope(row, weights, clicked[i], width);
      for (int64_t j = 0; j < width; ++j) row[j] -= rate * g * weights[j];
    });
  } else if (kind == 1) {
    for_rows(ids, n, width, tables, 2, threads, [=](int64_t i, int64_t at) {
      float *row = table + at, *sum = first + at;
      const float s = scale * slope(row, weights, clicked[i], width);
      for (int64_t j = 0; j < width; ++j) {
        const float g = s * weights[j];
        sum[j] += g * g;
        row[j] -= rate * g / std::sqrt(sum[j] + 1e-7f);
      }
    });
  } else if (kind == 2) {
    for_rows(ids, n, width, tables, 3, threads, [=](int64_t i, int64_t at) {
      float *row = table + at, *mu = first + at, *nu = second + at;
      const float s = scale * slope(row, weights, clicked[i], width);
      for (int64_t j = 0; j < width; ++j) {
        const float g = s * weights[j];
        mu[j] += 0.1f * (g - mu[j]);
        nu[j] += 0.001f * (g * g - nu[j]);
        row[j] -= rate * mu[j] / (std::sqrt(nu[j]) + 1e-8f);
      }
    });
  } else {
    for_rows(ids, n, width, tables, 1, threads, [=](int64_t i, int64_t at) {
      float* row = table + at;
      const float s = scale * slope(row, weights, clicked[i], width);
      float mean = 0;
      for (int64_t j = 0; j < width; ++j) mean += s * s * weights[j] * weights[j];
      float& sum = first[at / width];
      sum += mean / width;
      const float step = rate / (std::sqrt(sum) + 1e-8f);
      for (int64_t j = 0; j < width; ++j) row[j] -= step * s * weights[j];
    });
  }
}
