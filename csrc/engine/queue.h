// An intrusive FIFO of chunks or files.
#pragma once

namespace lazyckpt {

struct Job;

// The link of a Queue, and the tag of an I/O request: a chunk to write or a file to sync.
struct IoTag {
  explicit IoTag(bool sync) : is_sync(sync) {}
  const bool is_sync;
  Job* job = nullptr;
  IoTag* next = nullptr;  // in the queue that holds it
};

// An item is in at most one queue at a time. Queuing allocates nothing, so a job can always be failed and drained.
// Not thread-safe: the engine's mutex guards every queue.
template <class T>
class Queue {
 public:
  Queue() = default;
  Queue(const Queue&) = delete;

  bool empty() const { return first_ == nullptr; }
  T* front() const { return static_cast<T*>(first_); }
  void push_back(T* item) { Link(end_, item); }
  void push_front(T* item) { Link(&first_, item); }
  T* pop_front() { return Unlink(&first_); }

  // Inserts `item` before the first one for which `later` holds.
  template <class F>
  void insert(T* item, F later) {
    Link(Find(later), item);
  }

  template <class F>
  void erase_if(F unwanted) {
    for (IoTag** at = &first_; *at != nullptr;)
      if (unwanted(static_cast<const T*>(*at)))
        Unlink(at);
      else
        at = &(*at)->next;
  }

  // Removes and returns the first item for which `wanted` holds; nullptr if there is none.
  template <class F>
  T* take(F wanted) {
    IoTag** const at = Find(wanted);
    return *at == nullptr ? nullptr : Unlink(at);
  }

 private:
  template <class F>
  IoTag** Find(F wanted) {
    IoTag** at = &first_;
    while (*at != nullptr && !wanted(static_cast<const T*>(*at))) at = &(*at)->next;
    return at;
  }

  void Link(IoTag** at, T* item) {
    item->next = *at;
    *at = item;
    if (at == end_) end_ = &item->next;
  }

  T* Unlink(IoTag** at) {
    IoTag* const item = *at;
    *at = item->next;
    if (end_ == &item->next) end_ = at;
    return static_cast<T*>(item);
  }

  IoTag* first_ = nullptr;
  IoTag** end_ = &first_;  // where the next item is linked
};

}  // namespace lazyckpt
