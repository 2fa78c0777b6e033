#include "tests/fakes/machine/state_folder.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <utility>

#include "daemon/base/unique_fd.h"
#include "tests/fakes/machine/shared_file.h"

namespace gradsync::fakes {
namespace {

std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Board* MapBoard(const std::string& path, int flags) {
  const daemon::UniqueFd fd = OpenShared(path, O_RDWR | flags);
  if (!fd.valid() || (flags != 0 && ftruncate(fd.get(), sizeof(Board)) != 0)) return nullptr;
  void* const page = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  return page == MAP_FAILED ? nullptr : static_cast<Board*>(page);
}

}  // namespace

std::unique_ptr<StateFolder> StateFolder::Create(const std::string& path,
                                                 const MachineDescription& machine) {
  for (std::size_t gpu = 0; gpu < machine.gpus.size(); ++gpu) {
    const std::string memory = path + "/gpu" + std::to_string(gpu);
    constexpr mode_t kAll = 0777;
    if (mkdir(memory.c_str(), kAll) != 0 || chmod(memory.c_str(), kAll) != 0) return nullptr;
  }
  Board* const board = MapBoard(path + "/board", O_CREAT | O_EXCL);
  if (board == nullptr) return nullptr;
  std::unique_ptr<StateFolder> folder(new StateFolder(path, machine, board));
  if (!folder->WriteFile("machine", FormatMachine(machine))) return nullptr;
  return folder;
}

std::unique_ptr<StateFolder> StateFolder::Open(const std::string& path) {
  std::optional<MachineDescription> machine = ParseMachine(Contents(path + "/machine"));
  if (!machine.has_value()) return nullptr;
  Board* const board = MapBoard(path + "/board", 0);
  if (board == nullptr) return nullptr;
  return std::unique_ptr<StateFolder>(new StateFolder(path, *std::move(machine), board));
}

const StateFolder* StateFolder::OfThisProcess() {
  static const StateFolder* const folder = []() -> const StateFolder* {
    const char* const path = std::getenv(kStateVariable);
    if (path == nullptr) return nullptr;
    std::unique_ptr<StateFolder> opened = Open(path);
    if (opened == nullptr) {
      std::fprintf(stderr, "%s=%s: no fake machine is there\n", kStateVariable, path);
    }
    return opened.release();
  }();
  return folder;
}

StateFolder::~StateFolder() { munmap(board_, sizeof(Board)); }

void StateFolder::Note(const char* kind, const std::string& text) const {
  const std::string line = std::to_string(getpid()) + ' ' + kind + ' ' + text + '\n';
  const daemon::UniqueFd fd = OpenShared(PathOf("journal"), O_WRONLY | O_APPEND | O_CREAT);
  // A single write, so that lines of several processes do not mix.
  if (!fd.valid() || write(fd.get(), line.data(), line.size()) < 0) std::perror("journal");
  board_->journal_lines.fetch_add(1);
  FutexWakeAll(board_->journal_lines);
}

std::vector<JournalLine> StateFolder::Journal() const {
  std::vector<JournalLine> lines;
  std::istringstream text(ReadFile("journal"));
  for (JournalLine line; text >> line.pid >> line.kind;) {
    std::getline(text >> std::ws, line.text);
    lines.push_back(line);
  }
  return lines;
}

std::string StateFolder::ReadFile(std::string_view name) const { return Contents(PathOf(name)); }

bool StateFolder::WriteFile(std::string_view name, std::string_view content) const {
  const std::string path = PathOf(name);
  const std::string temporary = path + ".new";
  {
    std::ofstream file(temporary, std::ios::binary);
    file << content;
    if (!file.flush()) return false;
  }
  return rename(temporary.c_str(), path.c_str()) == 0;
}

}  // namespace gradsync::fakes
