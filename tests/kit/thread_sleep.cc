#include "tests/kit/thread_sleep.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <thread>

namespace gradsync {

pid_t ThisThread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void AwaitSleep(pid_t thread, const std::atomic<bool>* returned) {
  for (std::string state; state != "S"; std::this_thread::yield()) {
    if (returned != nullptr && *returned) return;
    std::ifstream stat("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::string id;
    std::string name;
    stat >> id >> name >> state;
  }
}

}  // namespace gradsync
