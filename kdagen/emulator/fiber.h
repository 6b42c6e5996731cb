// Fibers: one stack per lane and a switch between them that costs a few nanoseconds.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#define KDAEMU_UCONTEXT 1
#endif

#if defined(KDAEMU_UCONTEXT)

struct Fiber {
  ucontext_t context;
};
inline void fiber_switch(Fiber &from, Fiber &to) { swapcontext(&from.context, &to.context); }
inline void fiber_make(Fiber &fiber, char *stack, size_t bytes, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#else

struct Fiber {
  void *stack_pointer = nullptr;
};

// Saves the callee-saved registers on the running stack, stores its pointer in *from and continues at `to`.
extern "C" void kdaemu_switch(void **from, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.globl kdaemu_switch
.hidden kdaemu_switch
.type kdaemu_switch,@function
kdaemu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size kdaemu_switch,.-kdaemu_switch
)");
constexpr int kSavedWords = 6;    // below the return address
constexpr int kReturnWord = 6;
constexpr int kFrameWords = 8;    // the entry finds its stack 8 bytes off a multiple of 16, as after a call
#else
asm(R"(
.text
.globl kdaemu_switch
.hidden kdaemu_switch
.type kdaemu_switch,%function
kdaemu_switch:
  stp x29, x30, [sp, #-160]!
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x29, x30, [sp], #160
  ret
.size kdaemu_switch,.-kdaemu_switch
)");
constexpr int kReturnWord = 1;  // x30
constexpr int kFrameWords = 20;
#endif

inline void fiber_switch(Fiber &from, Fiber &to) { kdaemu_switch(&from.stack_pointer, to.stack_pointer); }
inline void fiber_make(Fiber &fiber, char *stack, size_t bytes, void (*entry)()) {
  auto *frame = reinterpret_cast<void **>(stack + bytes) - kFrameWords;
  for (int i = 0; i < kFrameWords; ++i) frame[i] = nullptr;
  frame[kReturnWord] = reinterpret_cast<void *>(entry);
  fiber.stack_pointer = frame;
}

#endif

// `count` stacks, side by side. No guard pages: with one per lane, 128 host threads pass Linux's 65,530 mappings a process.
class Stacks {
 public:
  static constexpr size_t kBytes = 64 * 1024;
  static constexpr size_t kReserve = 16 * 1024;  // a function that starts with less left has overflowed

  explicit Stacks(int count) : bytes_(count * kBytes) {
    base_ = static_cast<char *>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) {
      std::perror("kdagen emulator: mmap of lane stacks");
      std::abort();
    }
  }
  ~Stacks() { munmap(base_, bytes_); }
  Stacks(const Stacks &) = delete;
  Stacks &operator=(const Stacks &) = delete;

  char *of(int i) const { return base_ + i * kBytes; }
  bool holds(int i, uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(of(i)) < kBytes; }

 private:
  char *base_;
  size_t bytes_;
};
