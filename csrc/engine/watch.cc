// Which pages of a checkpoint the kernel watches, and when.
//
// A checkpoint begins: Watch. Each chunk is laid out: KeepEdges; copied: CopyWatched.
// Nothing is copied any more: EndWatch.
#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

#include "engine/checksum.h"
#include "engine/engine.h"

namespace lazyckpt {

// From here on, what is written to lazy sources is noticed.
void Engine::Watch(Job& job) {
  for (Source& s : job.sources) {
    if (s.owners == 0 || s.device >= 0) continue;
    if (const PageRange pages = PageRange::Inside(s.data, s.size); !pages.empty())
      s.watched = static_cast<int64_t>(job.window.Add(pages));
    else
      s.owners = 0;
  }
  witness_->Open(&job.window);
  witness_->Protect(&job.window);
  for (Source& s : job.sources) {
    if (s.watched < 0 || job.window.is_protected(static_cast<size_t>(s.watched))) continue;
    s.watched = -1;
    s.owners = 0;
  }
}

// Nothing of it is copied any more: training writes to these pages at full speed again.
void Engine::EndWatch(Job& job) {
  if (witness_ == nullptr) return;
  witness_->Close(&job.window);
  const std::vector<size_t> numbers = witness_->Written(&job.window);
  std::vector<size_t> torn;
  for (size_t i = 0; i < job.sources.size() && !numbers.empty(); ++i) {
    const int64_t watched = job.sources[i].watched;
    if (watched >= 0 && std::binary_search(numbers.begin(), numbers.end(), static_cast<size_t>(watched)))
      torn.push_back(i);
  }
  std::lock_guard lock(mutex_);
  job.torn = std::move(torn);
}

// A page that a watched piece shares with something else tells nothing of the piece: its bytes of that are copied now.
void Engine::KeepEdges(Chunk* chunk) {
  const auto edges_of = [chunk](const Piece& p) -> std::array<std::span<const std::byte>, 2> {
    if (p.kind != RowKind::kSource || chunk->job->sources[p.source].watched < 0) return {};
    return EdgesOf({chunk->job->sources[p.source].data + p.source_offset, p.size});
  };
  size_t bytes = 0;
  for (const Piece& p : chunk->pieces)
    for (const auto& edge : edges_of(p)) bytes += edge.size();
  if (bytes == 0) return;
  idle_edges_.reserve(++used_edges_ + idle_edges_.size());  // Release() needs no memory
  if (!idle_edges_.empty()) {
    chunk->edges = std::move(idle_edges_.back());
    idle_edges_.pop_back();
  }
  chunk->edges.reserve(bytes);
  for (const Piece& p : chunk->pieces)
    for (const auto& edge : edges_of(p)) chunk->edges.insert(chunk->edges.end(), edge.begin(), edge.end());
}

// The pieces of watched sources; false if one was written to. Many at once: see PageWitness::CheckAndOpen.
bool Engine::CopyWatched(Job& job, Chunk* chunk) {
  std::array<PageWitness::Copied, 64> copied;
  std::array<Piece*, 64> pieces;
  size_t count = 0;
  bool clean = true;
  const auto check = [&] {
    const std::span batch(copied.data(), count);
    witness_->CheckAndOpen(&job.window, batch);
    for (size_t i = 0; i < count; ++i) {
      if (copied[i].patched) pieces[i]->crc = Crc32(0, copied[i].to, pieces[i]->size);
      clean = clean && !copied[i].written;
    }
    count = 0;
  };
  const std::byte* edges = chunk->edges.data();
  for (Piece& p : chunk->pieces) {
    if (p.kind != RowKind::kSource || job.sources[p.source].watched < 0) continue;
    const Source& source = job.sources[p.source];
    const std::span memory(source.data + p.source_offset, p.size);
    const auto [head, tail] = EdgesOf(memory);
    const size_t middle = memory.size() - head.size() - tail.size();
    std::byte* const to = chunk->memory + p.at;
    uint32_t crc = CopyCrc32(0, to, edges, head.size());
    crc = CopyCrc32(crc, to + head.size(), memory.data() + head.size(), middle);
    p.crc = CopyCrc32(crc, to + head.size() + middle, edges + head.size(), tail.size());
    edges += head.size() + tail.size();
    pieces[count] = &p;
    copied[count++] = {static_cast<size_t>(source.watched), memory, to};
    if (count == copied.size()) check();
  }
  if (count > 0) check();
  return clean;
}

}  // namespace lazyckpt
