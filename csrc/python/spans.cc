#include "python/spans.h"

#include <algorithm>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>

namespace lazyckpt {
namespace {

struct Merged {
  Span span;
  int64_t least, most;  // bytes of an element of its tensors

  // The tensors of one span may have elements of several sizes. Each has its offset there in elements of its own.
  Span Aligned() const {
    const int64_t before = least == most ? 0 : span.begin % most;
    return {span.storage, span.begin - before, span.nbytes + before};
  }
};

// The spans of one storage. `order`: its tensors by their first bytes; those without elements come first.
void Split(const std::vector<Use>& uses, std::span<const uint32_t> order, Spans* found) {
  const auto first = static_cast<uint32_t>(found->spans.size());
  const Use& any = uses[order[0]];
  std::vector<Merged> merged;
  int64_t end = 0;
  bool is_whole = any.storage_nbytes == 0;
  for (const uint32_t at : order) {
    const Use& use = uses[at];
    if (merged.empty() || (use.begin >= end && use.end > use.begin)) {
      merged.push_back({{use.storage, use.begin, 0}, use.itemsize, use.itemsize});
      end = use.end;
    }
    Merged& last = merged.back();
    end = std::max(end, use.end);
    last.span.nbytes = end - last.span.begin;
    last.least = std::min(last.least, use.itemsize);
    last.most = std::max(last.most, use.itemsize);
    is_whole = is_whole || last.span.nbytes >= any.storage_nbytes || end > any.storage_nbytes;
    found->of[at] = first + static_cast<uint32_t>(merged.size()) - 1;
  }
  if (is_whole) {
    found->spans.push_back({any.storage, 0, any.storage_nbytes});
    for (const uint32_t at : order) found->of[at] = first;
  } else {
    for (const Merged& one : merged) found->spans.push_back(one.Aligned());
  }
}

// Numbers the spans in the order of their first tensors.
void Renumber(Spans* found) {
  const auto none = static_cast<uint32_t>(found->spans.size());
  std::vector<uint32_t> numbers(found->spans.size(), none);
  std::vector<Span> spans;
  spans.reserve(found->spans.size());
  for (uint32_t& number : found->of) {
    if (numbers[number] == none) {
      numbers[number] = static_cast<uint32_t>(spans.size());
      spans.push_back(found->spans[number]);
    }
    number = numbers[number];
  }
  found->spans = std::move(spans);
}

}  // namespace

Use UseOf(const TensorFacts& facts, uint32_t storage) {
  int64_t last = facts.offset;
  for (size_t i = 0; i < facts.sizes.size(); ++i) last += (facts.sizes[i] - 1) * facts.strides[i];
  const bool is_empty = facts.numel() == 0;
  return {.storage = storage,
          .storage_nbytes = facts.storage_nbytes,
          .begin = is_empty ? 0 : facts.offset * facts.itemsize,
          .end = is_empty ? 0 : (last + 1) * facts.itemsize,
          .offset = facts.offset,
          .itemsize = facts.itemsize};
}

Spans SpansOf(const std::vector<Use>& uses) {
  Spans found;
  found.of.resize(uses.size());
  std::vector<uint32_t> order(uses.size());
  std::iota(order.begin(), order.end(), 0);
  const auto place = [&uses](uint32_t at) { return std::tuple(uses[at].storage, uses[at].begin, uses[at].end); };
  std::sort(order.begin(), order.end(), [&place](uint32_t a, uint32_t b) { return place(a) < place(b); });
  for (size_t first = 0, last = 0; first < order.size(); first = last) {
    while (last < order.size() && uses[order[last]].storage == uses[order[first]].storage) ++last;
    Split(uses, std::span(order).subspan(first, last - first), &found);
  }
  Renumber(&found);
  return found;
}

}  // namespace lazyckpt
