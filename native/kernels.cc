// Kernels that read, sum and add rows of tables by id, and find keys in a hash table, on a
// CPU: handlers of XLA's foreign functions (jax.ffi), and the module that hands them to
// Python.
//
// XLA's own loops ask for a row when they need it, so a core waits for memory at most of
// them. These ask for rows ahead. Apart from that they compute what the loops compute,
// each number in one fixed order, whatever the number of threads.
//
// An id out of range reads nothing and writes nothing. No kernel allocates memory of the
// size of its arguments.

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = ::xla::ffi;

// One binary for all x86: the loader of glibc takes the version for the processor.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__)
#define VERSIONS \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VERSIONS
#endif
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

constexpr int64_t kLine = 64;              // bytes of a cache line
constexpr int64_t kLinesAhead = 192;       // cache lines that are asked for ahead: 12 KB
constexpr int64_t kMostAsked = 16 * kLine;  // of a row: the processor fetches the rest itself
constexpr int64_t kLongest = 512;           // rows that are added up one after the other
constexpr int64_t kTaskBytes = 128 << 10;  // a task that reads less is not worth a thread

// ------------------------------------------------------------------ threads

// Tasks 0 to count - 1, which threads take in turn.
struct Tasks {
  Tasks(int64_t count, std::function<void(int64_t)> run)
      : count(count), run(std::move(run)) {}

  // Runs tasks until none is left to take.
  void Work() {
    for (;;) {
      const int64_t task = next.fetch_add(1);
      if (task >= count) return;
      run(task);
      if (done.fetch_add(1) + 1 == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  }

  const int64_t count;
  const std::function<void(int64_t)> run;
  std::atomic<int64_t> next{0}, done{0};
  std::mutex mutex;
  std::condition_variable all_done;
};

// Runs the tasks on the caller's thread and on those of XLA's pool that are free.
//
// The caller waits only for tasks that a thread is running, never for one that the pool
// has yet to begin: so two programs that share a pool cannot wait for each other. A
// thread that comes too late finds no task; `run` is gone by then, and not called.
void RunTasks(ffi::ThreadPool& pool, int64_t count, std::function<void(int64_t)> run) {
  const int64_t threads = std::min(count, std::max<int64_t>(pool.num_threads(), 1));
  if (threads <= 1) {
    for (int64_t task = 0; task < count; ++task) run(task);
    return;
  }
  auto tasks = std::make_shared<Tasks>(count, std::move(run));
  for (int64_t k = 1; k < threads; ++k) {
    pool.Schedule([tasks] { tasks->Work(); });
  }
  tasks->Work();
  // The others are about to end: a core that goes to sleep takes longer to wake up.
  for (int spin = 0; spin < 1 << 14; ++spin) {
    if (tasks->done.load() == count) return;
  }
  std::unique_lock<std::mutex> lock(tasks->mutex);
  tasks->all_done.wait(lock, [&] { return tasks->done.load() == count; });
}

// How many tasks the work is cut into, by the bytes that it reads.
int64_t CountTasks(ffi::ThreadPool& pool, int64_t bytes, int64_t per_thread) {
  const int64_t most = per_thread * std::max<int64_t>(pool.num_threads(), 1);
  return std::clamp<int64_t>(bytes / kTaskBytes, 1, most);
}

// ------------------------------------------------------------------ ids and numbers

template <class Id>
INLINE bool InRange(Id id, int64_t height) {
  return static_cast<uint64_t>(static_cast<int64_t>(id)) <
         static_cast<uint64_t>(height);
}

bool AreIds(ffi::AnyBuffer ids) {
  return ids.element_type() == ffi::S32 || ids.element_type() == ffi::S64;
}

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// 16 numbers: one register of AVX-512, two of AVX, four of SSE. Compilers keep these in
// registers, but not always arrays.
constexpr int kLanes = 16;
template <class Number>
struct VectorOf {
  typedef Number type __attribute__((vector_size(kLanes * sizeof(Number))));
};
template <class Number>
using Vector = typename VectorOf<Number>::type;

template <class Number>
INLINE Vector<Number> Load(const void* from) {
  Vector<Number> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <class Number, class Other>
INLINE Vector<Number> BitsAs(const Other& x) {
  static_assert(sizeof(Vector<Number>) == sizeof(Other));
  return Load<Number>(&x);
}

// Numbers of a table in the type in which they are added up.
INLINE Vector<float> Wide(const float* x) { return Load<float>(x); }
INLINE Vector<double> Wide(const double* x) { return Load<double>(x); }
INLINE Vector<float> Wide(const Bfloat16* x) {
  const auto bits = __builtin_convertvector(Load<uint16_t>(x), Vector<uint32_t>);
  return BitsAs<float>(bits << 16);
}
// By arithmetic: not every processor has an instruction for it.
INLINE Vector<float> Wide(const Float16* x) {
  const auto bits = __builtin_convertvector(Load<uint16_t>(x), Vector<uint32_t>);
  const auto high = bits << 16, twice = bits << 17;
  const auto normal = BitsAs<float>((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const auto subnormal = BitsAs<float>((twice >> 17) | (126u << 23)) - 0.5f;
  const auto is_normal = BitsAs<uint32_t>(twice >= (1u << 27));
  return BitsAs<float>((is_normal & BitsAs<uint32_t>(normal)) |
                       (~is_normal & BitsAs<uint32_t>(subnormal)) |
                       (high & 0x80000000u));
}

template <class T>
using Sum = std::remove_reference_t<decltype(Wide(std::declval<const T*>())[0])>;

// The same, of a buffer; codes are added up as floats.
ffi::DataType SumType(ffi::AnyBuffer table) {
  return table.element_type() == ffi::F64 ? ffi::F64 : ffi::F32;
}

// Asks for the cache lines of the first bytes of a row, which may begin within a line.
INLINE void Prefetch(const void* row, int64_t bytes) {
  const char* at = static_cast<const char*>(row);
  // One pointer: GCC would compute an address for each line from the row's number.
  asm volatile("" : "+r"(at));
  for (int64_t k = 0; k < bytes; k += kLine) __builtin_prefetch(at + k);
  __builtin_prefetch(at + bytes - 1);
}

// ------------------------------------------------------------------ sums of bags

struct Bags {
  const void* table;  // [height, width]
  int64_t height, width;
  const void* ids;       // [count]
  const void* segments;  // [count], ascending, or null: `length` ids a bag
  int64_t count, bags, length;
  const void* weights;  // [count], for codes [count, 2], or null
  void* sums;           // [bags, width], for codes [bags, 8 / bits, width]
};

// The elements [begin, end) of a bag.
struct Span {
  int64_t bag, begin, end;
};

// The kinds of rows: what one adds to 16 columns of a sum, and to all of them.

template <class T, bool kIsWeighted>
struct Floats {
  using Element = T;
  using Total = Sum<T>;

  INLINE Vector<Total> Term(int64_t i, const T* row) const {
    return kIsWeighted ? weights[i] * Wide(row) : Wide(row);
  }
  INLINE Total Bias(int64_t) const { return 0; }

  static constexpr bool kHasBias = false;
  const Total* weights;  // [count]
};

template <int kBits>
struct Codes {
  using Element = uint8_t;
  using Total = float;

  INLINE Vector<float> Term(int64_t i, const uint8_t* row) const {
    Vector<uint8_t> codes = Load<uint8_t>(row);
    if (kBits < 8) codes = (codes >> shift) & static_cast<uint8_t>((1 << kBits) - 1);
    // In steps that processors have: GCC would convert one number at a time.
    const auto two_bytes = __builtin_convertvector(codes, Vector<uint16_t>);
    const auto four_bytes = __builtin_convertvector(two_bytes, Vector<int32_t>);
    return pairs[2 * i] * __builtin_convertvector(four_bytes, Vector<float>);
  }
  INLINE float Bias(int64_t i) const { return pairs[2 * i + 1]; }

  static constexpr bool kHasBias = true;
  const float* pairs;  // [count, 2], scales and biases
  uint8_t shift;       // of the plane's codes in a byte
};

// Sums of kGroups * 16 columns. Members, not an array: compilers keep them in registers.
template <class Kind, int kGroups>
struct Sums {
  using Total = typename Kind::Total;

  INLINE void AddRow(const Kind& kind, int64_t i, const typename Kind::Element* row) {
    first += kind.Term(i, row);
    if constexpr (kGroups > 1) rest.AddRow(kind, i, row + kLanes);
  }
  INLINE void AddSums(const Sums& other, Total bias) {
    first += Kind::kHasBias ? other.first + bias : other.first;
    if constexpr (kGroups > 1) rest.AddSums(other.rest, bias);
  }
  INLINE void Store(Total* out) const {
    std::memcpy(out, &first, sizeof(first));
    if constexpr (kGroups > 1) rest.Store(out + kLanes);
  }

  Vector<Total> first = {};
  Sums<Kind, kGroups - 1> rest;
};
template <class Kind>
struct Sums<Kind, 0> {};

// Columns [column, column + kGroups * 16) of the sum of a bag.
template <int kGroups, class Id, class Kind>
INLINE void SumColumns(const Bags& b, const Kind& kind, const Span& span, int64_t column,
                       typename Kind::Total* out) {
  using T = typename Kind::Element;
  constexpr int64_t kBytes = kGroups * kLanes * sizeof(T);
  constexpr int64_t kAhead = std::clamp<int64_t>(kLinesAhead * kLine / kBytes, 4, 128);
  const T* table = static_cast<const T*>(b.table) + column;
  const Id* ids = static_cast<const Id*>(b.ids);
  const int64_t height = b.height, width = b.width, asked = b.count - kAhead;
  Sums<Kind, kGroups> total;
  // In parts: a small number added to a large sum loses its digits.
  for (int64_t begin = span.begin; begin < span.end; begin += kLongest) {
    const int64_t end = std::min(begin + kLongest, span.end);
    Sums<Kind, kGroups> part;
    typename Kind::Total bias = 0;
    for (int64_t i = begin; i < end; ++i) {
      if (i < asked && InRange(ids[i + kAhead], height)) {
        Prefetch(table + ids[i + kAhead] * width, kBytes);
      }
      if (!InRange(ids[i], height)) continue;
      part.AddRow(kind, i, table + ids[i] * width);
      if (Kind::kHasBias) bias += kind.Bias(i);
    }
    total.AddSums(part, bias);
  }
  total.Store(out + column);
}

// All columns of the sum of a bag, 16 or more.
template <class Id, class Kind>
INLINE void SumBag(const Bags& b, const Kind& kind, const Span& span,
                   typename Kind::Total* out) {
  const int64_t width = b.width;
  int64_t k = 0;
  for (; k + 4 * kLanes <= width; k += 4 * kLanes) {
    SumColumns<4, Id>(b, kind, span, k, out);
  }
  // The last 16 may begin among those that are done: they come out the same.
  for (; k < width; k += kLanes) {
    SumColumns<1, Id>(b, kind, span, std::min(k, width - kLanes), out);
  }
}

template <class T, bool kWeighted, class Id>
INLINE void SumFloats(const Bags& b, const Span& span) {
  const Floats<T, kWeighted> kind{static_cast<const Sum<T>*>(b.weights)};
  SumBag<Id>(b, kind, span, static_cast<Sum<T>*>(b.sums) + span.bag * b.width);
}

template <int kBits, class Id>
INLINE void SumCodes(const Bags& b, const Span& span) {
  constexpr int kPlanes = 8 / kBits;
  float* out = static_cast<float*>(b.sums) + span.bag * kPlanes * b.width;
  for (int plane = 0; plane < kPlanes; ++plane) {
    const Codes<kBits> kind{static_cast<const float*>(b.weights),
                            static_cast<uint8_t>(plane * kBits)};
    SumBag<Id>(b, kind, span, out + plane * b.width);
  }
}

// The first element of `bag` or of a later one.
template <class Id>
INLINE int64_t FirstOf(const Bags& b, int64_t bag) {
  const Id* segments = static_cast<const Id*>(b.segments);
  if (!segments) return bag * b.length;
  return std::lower_bound(segments, segments + b.count, bag) - segments;
}

// The end of a bag that begins at `begin`: in strides, since a bag's elements are together.
template <class Id>
INLINE int64_t EndOf(const Bags& b, int64_t bag, int64_t begin) {
  const Id* segments = static_cast<const Id*>(b.segments);
  if (!segments) return begin + b.length;
  int64_t end = begin;
  for (const int64_t stride : {16, 4, 1}) {
    while (end + stride <= b.count && segments[end + stride - 1] == bag) end += stride;
  }
  return end;
}

// What sums bags [first, last): a function for each type, so that each has its versions.
#define DEFINE_SUM(NAME, ID, ...)                                  \
  VERSIONS void NAME(const Bags& b, int64_t first, int64_t last) { \
    int64_t begin = FirstOf<ID>(b, first);                         \
    for (int64_t bag = first; bag < last; ++bag) {                 \
      const Span span{bag, begin, EndOf<ID>(b, bag, begin)};       \
      __VA_ARGS__(b, span);                                        \
      begin = span.end;                                            \
    }                                                              \
  }
#define DEFINE_SUMS(NAME, ...)                       \
  DEFINE_SUM(NAME##32, int32_t, __VA_ARGS__, int32_t>) \
  DEFINE_SUM(NAME##64, int64_t, __VA_ARGS__, int64_t>)
DEFINE_SUMS(SumFloat32By, SumFloats<float, false)
DEFINE_SUMS(SumFloat32WeightedBy, SumFloats<float, true)
DEFINE_SUMS(SumFloat64By, SumFloats<double, false)
DEFINE_SUMS(SumFloat64WeightedBy, SumFloats<double, true)
DEFINE_SUMS(SumBfloat16By, SumFloats<Bfloat16, false)
DEFINE_SUMS(SumBfloat16WeightedBy, SumFloats<Bfloat16, true)
DEFINE_SUMS(SumFloat16By, SumFloats<Float16, false)
DEFINE_SUMS(SumFloat16WeightedBy, SumFloats<Float16, true)
DEFINE_SUMS(SumCodes8By, SumCodes<8)
DEFINE_SUMS(SumCodes4By, SumCodes<4)
DEFINE_SUMS(SumCodes2By, SumCodes<2)
#undef DEFINE_SUMS
#undef DEFINE_SUM

using SumRange = void (*)(const Bags&, int64_t, int64_t);

#define EITHER(NAME) (ids_are_64 ? NAME##64 : NAME##32)
SumRange FindSum(ffi::DataType type, int64_t bits, bool weighted, bool ids_are_64) {
  switch (type) {
    case ffi::F32:
      return weighted ? EITHER(SumFloat32WeightedBy) : EITHER(SumFloat32By);
    case ffi::F64:
      return weighted ? EITHER(SumFloat64WeightedBy) : EITHER(SumFloat64By);
    case ffi::BF16:
      return weighted ? EITHER(SumBfloat16WeightedBy) : EITHER(SumBfloat16By);
    case ffi::F16:
      return weighted ? EITHER(SumFloat16WeightedBy) : EITHER(SumFloat16By);
    case ffi::U8:
      if (!weighted) return nullptr;
      if (bits == 8) return EITHER(SumCodes8By);
      if (bits == 4) return EITHER(SumCodes4By);
      return bits == 2 ? EITHER(SumCodes2By) : nullptr;
    default:
      return nullptr;
  }
}
#undef EITHER

// The bag at which task `k` of `tasks` begins. Tasks have about as many elements each.
int64_t FirstBag(const Bags& b, bool ids_are_64, int64_t k, int64_t tasks) {
  if (k == tasks) return b.bags;
  if (k == 0 || !b.segments) return b.bags * k / tasks;
  const int64_t i = b.count * k / tasks;
  const int64_t bag = ids_are_64 ? static_cast<const int64_t*>(b.segments)[i]
                                 : static_cast<const int32_t*>(b.segments)[i];
  return std::clamp<int64_t>(bag, 0, b.bags);
}

// Weighted sums of rows. Empty `segments` mean fixed bags, `ids [bags, length]`; empty
// `weights` mean ones. `bits` are those of a code, 0 where the table has floats.
ffi::Error SumBags(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::AnyBuffer ids,
                   ffi::AnyBuffer segments, ffi::AnyBuffer weights,
                   ffi::Result<ffi::AnyBuffer> sums, int64_t bits) {
  const bool segmented = segments.element_count() > 0;
  const bool weighted = weights.element_count() > 0;
  const bool ids_are_64 = ids.element_type() == ffi::S64;
  const SumRange sum = FindSum(table.element_type(), bits, weighted, ids_are_64);
  const size_t pairs = bits ? 2 : 1;
  if (!sum || !AreIds(ids) || sums->element_type() != SumType(table) ||
      (weighted && weights.element_type() != SumType(table)) ||
      (segmented && segments.element_type() != ids.element_type())) {
    return ffi::Error::InvalidArgument("sum_bags: no kernel for these types");
  }
  if (table.dimensions().size() != 2 || table.dimensions()[1] < kLanes ||
      ids.dimensions().size() != (segmented ? 1 : 2) ||
      (segmented && segments.element_count() != ids.element_count()) ||
      (weighted && weights.element_count() != pairs * ids.element_count())) {
    return ffi::Error::InvalidArgument("sum_bags: no kernel for these shapes");
  }
  Bags b{};
  b.table = table.untyped_data();
  b.height = table.dimensions()[0];
  b.width = table.dimensions()[1];
  b.ids = ids.untyped_data();
  b.segments = segmented ? segments.untyped_data() : nullptr;
  b.count = ids.element_count();
  b.bags = sums->dimensions()[0];
  b.length = segmented ? 0 : ids.dimensions()[1];
  b.weights = weighted ? weights.untyped_data() : nullptr;
  b.sums = sums->untyped_data();
  const int64_t row_bytes = table.size_bytes() / std::max<int64_t>(b.height, 1);
  const int64_t tasks = CountTasks(pool, b.count * row_bytes, 4);
  // No two tasks have a bag in common, even of segments that do not ascend.
  std::vector<int64_t> first(tasks + 1);
  for (int64_t k = 0; k <= tasks; ++k) {
    first[k] = std::max(FirstBag(b, ids_are_64, k, tasks), k ? first[k - 1] : 0);
  }
  RunTasks(pool, tasks, [&](int64_t k) {
    if (first[k] < first[k + 1]) sum(b, first[k], first[k + 1]);
  });
  return ffi::Error::Success();
}

// ------------------------------------------------------------------ rows read

template <class Id>
INLINE void CopyRows(const char* table, int64_t height, int64_t row_bytes, const Id* ids,
                     int64_t count, int64_t first, int64_t last, char* out) {
  const int64_t lines = (row_bytes + kLine - 1) / kLine;
  const int64_t ahead = std::clamp<int64_t>(kLinesAhead / lines, 4, 128);
  const int64_t asked = std::min(row_bytes, kMostAsked);
  auto row = [&](int64_t i) INLINE_LAMBDA {
    return table + std::clamp<int64_t>(ids[i], 0, height - 1) * row_bytes;
  };
  for (int64_t i = first; i < last; ++i) {
    if (i + ahead < count) Prefetch(row(i + ahead), asked);
    std::memcpy(out + i * row_bytes, row(i), row_bytes);
  }
}

// Rows of a table; an id out of range reads the nearest row.
ffi::Error ReadRows(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::AnyBuffer ids,
                    ffi::Result<ffi::AnyBuffer> rows) {
  const int64_t count = ids.element_count();
  if (!AreIds(ids) || rows->element_type() != table.element_type()) {
    return ffi::Error::InvalidArgument("read_rows: no kernel for these types");
  }
  if (!table.size_bytes()) {
    return ffi::Error::InvalidArgument("read_rows: there are no rows to read");
  }
  const int64_t height = table.dimensions()[0];
  const int64_t row_bytes = table.size_bytes() / height;
  const bool ids_are_64 = ids.element_type() == ffi::S64;
  const char* from = static_cast<const char*>(table.untyped_data());
  char* to = static_cast<char*>(rows->untyped_data());
  const int64_t tasks = CountTasks(pool, count * row_bytes, 4);
  RunTasks(pool, tasks, [&](int64_t k) {
    const int64_t first = count * k / tasks, last = count * (k + 1) / tasks;
    if (ids_are_64) {
      const auto* at = static_cast<const int64_t*>(ids.untyped_data());
      CopyRows(from, height, row_bytes, at, count, first, last, to);
    } else {
      const auto* at = static_cast<const int32_t*>(ids.untyped_data());
      CopyRows(from, height, row_bytes, at, count, first, last, to);
    }
  });
  return ffi::Error::Success();
}

// ------------------------------------------------------------------ rows added

struct Addition {
  void* table;  // [height, width]
  int64_t height, width;
  const void* ids;  // [count]
  int64_t count;
  const void* values;  // [count, width]
};

// Adds the values of those rows that belong to `part` of `parts`, in the order of the
// ids. Every thread looks at all ids, so none needs a list of its own.
template <class T, class Id>
INLINE void AddPart(const Addition& a, int64_t part, int64_t parts) {
  constexpr int64_t kAhead = 32;
  T* table = static_cast<T*>(a.table);
  const T* values = static_cast<const T*>(a.values);
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t width = a.width;
  const int64_t asked = std::min<int64_t>(width * sizeof(T), kMostAsked);
  int64_t waiting[kAhead], begin = 0, end = 0;
  auto add = [&](int64_t i) INLINE_LAMBDA {
    T* row = table + ids[i] * width;
    const T* value = values + i * width;
    for (int64_t k = 0; k < width; ++k) row[k] += value[k];
  };
  for (int64_t i = 0; i < a.count; ++i) {
    if (!InRange(ids[i], a.height)) continue;
    const uint64_t mixed = static_cast<uint64_t>(ids[i]) * 0x9E3779B97F4A7C15u >> 32;
    if (static_cast<int64_t>(mixed * parts >> 32) != part) continue;
    Prefetch(table + ids[i] * width, asked);
    Prefetch(values + i * width, asked);
    if (end - begin == kAhead) add(waiting[begin++ % kAhead]);
    waiting[end++ % kAhead] = i;
  }
  while (begin < end) add(waiting[begin++ % kAhead]);
}

#define DEFINE_ADD(NAME, ...)                                          \
  VERSIONS void NAME(const Addition& a, int64_t part, int64_t parts) { \
    AddPart<__VA_ARGS__>(a, part, parts);                              \
  }
DEFINE_ADD(AddFloat32By32, float, int32_t)
DEFINE_ADD(AddFloat32By64, float, int64_t)
DEFINE_ADD(AddFloat64By32, double, int32_t)
DEFINE_ADD(AddFloat64By64, double, int64_t)
#undef DEFINE_ADD

// A table to which values are added at ids. XLA gives it the buffer of the operand.
ffi::Error AddRows(ffi::ThreadPool pool, ffi::AnyBuffer table, ffi::AnyBuffer ids,
                   ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> sum) {
  const auto type = table.element_type();
  if ((type != ffi::F32 && type != ffi::F64) || values.element_type() != type ||
      !AreIds(ids)) {
    return ffi::Error::InvalidArgument("add_rows: no kernel for these types");
  }
  if (table.dimensions().size() != 2 ||
      static_cast<int64_t>(values.element_count()) !=
          static_cast<int64_t>(ids.element_count()) * table.dimensions()[1]) {
    return ffi::Error::InvalidArgument("add_rows: no kernel for these shapes");
  }
  if (sum->untyped_data() != table.untyped_data()) {
    std::memcpy(sum->untyped_data(), table.untyped_data(), table.size_bytes());
  }
  const bool ids_are_64 = ids.element_type() == ffi::S64;
  auto* add = type == ffi::F32 ? (ids_are_64 ? AddFloat32By64 : AddFloat32By32)
                               : (ids_are_64 ? AddFloat64By64 : AddFloat64By32);
  const Addition addition{sum->untyped_data(),
                          table.dimensions()[0],
                          table.dimensions()[1],
                          ids.untyped_data(),
                          static_cast<int64_t>(ids.element_count()),
                          values.untyped_data()};
  const int64_t parts = CountTasks(pool, values.size_bytes(), 1);
  RunTasks(pool, parts, [&](int64_t part) { add(addition, part, parts); });
  return ffi::Error::Success();
}

// ------------------------------------------------------------------ keys found

constexpr int kSlots = 8;  // of a bucket

struct Search {
  const uint32_t* buckets;  // [height, kSlots, words + 1]: the words of a key, its row
  int64_t height;
  const int32_t* choices;  // [2, count], the buckets in which a key may be
  const uint32_t* keys;    // [words, count]
  int64_t count;
  uint32_t* rows;  // [count]
};

// The row of keys [first, last), or the largest number. Where a key is in several slots,
// as after an eviction, the one with the smallest row counts.
template <int kWords>
INLINE void FindRange(const Search& s, int64_t first, int64_t last) {
  constexpr int64_t kAhead = 64, kBucket = kSlots * (kWords + 1);
  auto ask = [&](int32_t bucket) INLINE_LAMBDA {
    if (InRange(bucket, s.height)) Prefetch(s.buckets + bucket * kBucket, 4 * kBucket);
  };
  for (int64_t i = first; i < last; ++i) {
    if (i + kAhead < last) {
      ask(s.choices[i + kAhead]);
      ask(s.choices[s.count + i + kAhead]);
    }
    uint32_t row = UINT32_MAX;
    for (const int64_t at : {i, s.count + i}) {
      if (!InRange(s.choices[at], s.height)) continue;
      const uint32_t* slot = s.buckets + s.choices[at] * kBucket;
      for (int k = 0; k < kSlots; ++k, slot += kWords + 1) {
        bool is_same = true;
        for (int w = 0; w < kWords; ++w) is_same &= slot[w] == s.keys[w * s.count + i];
        row = std::min(row, is_same ? slot[kWords] : UINT32_MAX);
      }
    }
    s.rows[i] = row;
  }
}

VERSIONS void Find32(const Search& s, int64_t first, int64_t last) {
  FindRange<1>(s, first, last);
}
VERSIONS void Find64(const Search& s, int64_t first, int64_t last) {
  FindRange<2>(s, first, last);
}

// Rows of keys of one or two words in a hash table of buckets.
ffi::Error FindRows(ffi::ThreadPool pool, ffi::BufferR2<ffi::U32> buckets,
                    ffi::BufferR2<ffi::S32> choices, ffi::BufferR2<ffi::U32> keys,
                    ffi::ResultBufferR1<ffi::U32> rows) {
  const int64_t words = keys.dimensions()[0], count = keys.dimensions()[1];
  if ((words != 1 && words != 2) || buckets.dimensions()[1] != kSlots * (words + 1) ||
      choices.dimensions()[0] != 2 || choices.dimensions()[1] != count ||
      static_cast<int64_t>(rows->element_count()) != count) {
    return ffi::Error::InvalidArgument("find_rows: no kernel for these shapes");
  }
  const Search search{buckets.typed_data(), buckets.dimensions()[0],
                      choices.typed_data(), keys.typed_data(),
                      count,                rows->typed_data()};
  auto* find = words == 1 ? Find32 : Find64;
  const int64_t tasks = CountTasks(pool, count * 2 * kLine, 4);
  RunTasks(pool, tasks, [&](int64_t k) {
    find(search, count * k / tasks, count * (k + 1) / tasks);
  });
  return ffi::Error::Success();
}

using Any = ffi::AnyBuffer;

XLA_FFI_DEFINE_HANDLER(kSumBags, SumBags,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Any>()
                           .Arg<Any>()
                           .Arg<Any>()
                           .Arg<Any>()
                           .Ret<Any>()
                           .Attr<int64_t>("bits"));
XLA_FFI_DEFINE_HANDLER(
    kReadRows, ReadRows,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER(
    kAddRows, AddRows,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER(kFindRows, FindRows,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR2<ffi::U32>>()
                           .Arg<ffi::BufferR2<ffi::S32>>()
                           .Arg<ffi::BufferR2<ffi::U32>>()
                           .Ret<ffi::BufferR1<ffi::U32>>());

// ------------------------------------------------------------------ the module

// Adds a handler to the dict, as `jax.ffi.register_ffi_target` takes it.
bool Put(PyObject* found, const char* name, XLA_FFI_Handler* handler) {
  PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr);
  const bool done = capsule && PyDict_SetItemString(found, name, capsule) == 0;
  Py_XDECREF(capsule);
  return done;
}

PyObject* Handlers(PyObject*, PyObject*) {
  PyObject* found = PyDict_New();
  if (found && Put(found, "sum_bags", kSumBags) && Put(found, "read_rows", kReadRows) &&
      Put(found, "add_rows", kAddRows) && Put(found, "find_rows", kFindRows)) {
    return found;
  }
  Py_XDECREF(found);
  return nullptr;
}

PyMethodDef kMethods[] = {
    {"handlers", Handlers, METH_NOARGS, "The handlers by name, each in a capsule."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "sparsejax_native._kernels", nullptr, 0,
                       kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModule_Create(&kModule); }
