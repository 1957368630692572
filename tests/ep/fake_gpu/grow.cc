// The handlers of "nvlink" with a way to their windows from outside.
#include "handlers.cc"

// Makes the window as large as `rows` need; whether that failed.
extern "C" __attribute__((visibility("default"))) bool grow_fails(int64_t rows) {
  using namespace expertmesh;
  static Window window;
  Attributes attributes{};
  attributes.rows = rows;
  attributes.stride = 4096;
  return Grow(Opened<Nccl>(), Opened<Driver>(), nullptr, attributes, 1, window).failure();
}
