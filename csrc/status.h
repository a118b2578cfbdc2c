// The engine's errors are values; no exception leaves an engine thread.
#pragma once

#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <utility>

namespace lazyckpt {

// OK, or an errno value with the operation and the path that failed. Copying and making one never throws: if memory
// runs out, the words are dropped and the errno stays.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(int error, std::string_view operation, std::string_view path) noexcept : error_(error) {
    try {
      operation_ = operation;
      path_ = path;
    } catch (const std::bad_alloc&) {
    }
  }
  Status(const Status& other) noexcept : Status(other.error_, other.operation_, other.path_) {}
  Status(Status&&) noexcept = default;
  Status& operator=(const Status& other) noexcept { return *this = Status(other); }
  Status& operator=(Status&&) noexcept = default;
  ~Status() = default;

  static Status Ok() { return {}; }
  static Status NoMemory() { return {ENOMEM, "engine", ""}; }

  bool ok() const { return error_ == 0; }
  int error() const { return error_; }
  const std::string& operation() const { return operation_; }
  const std::string& path() const { return path_; }
  std::string message() const { return operation_ + ": " + std::strerror(error_); }

 private:
  int error_ = 0;
  std::string operation_;
  std::string path_;
};

}  // namespace lazyckpt
