// Replays what all ranks do, on a network, with SimGrid's S4U: replay IN OUT
//
// a2d_mpi.planning.simgrid writes IN and reads OUT; IN is a row of arrays, each after its length, in
// the order of `main`.  Every rank is an actor: it is busy, posts messages and waits for some.  A
// message starts when both sides have posted it; how fast it is, the links on its way say, and all
// others on them: SimGrid shares them.
#include <simgrid/s4u.hpp>

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <unordered_map>
#include <vector>

namespace s4u = simgrid::s4u;
using Ints = std::vector<int64_t>;
using Doubles = std::vector<double>;

enum Kind { SPEND, SEND, RECEIVE, WAIT };

struct Op {  // wide: its array has an entry for each rank, or else one
  int64_t kind, wide, a, b, c;
};

struct Side {  // of message a: the sender's (b < 0), or the receiver's, from ints[b + rank]
  int64_t message, from;
};

struct Sent {  // one message, while somebody needs it
  s4u::Mailbox* mailbox = nullptr;
  s4u::CommPtr comm[2];  // as the sender knows it, and the receiver
  int left = 2;          // sides that may still wait for it
  double latency = 0;
};

static Ints ints, wide, base, to, bytes, begin, end;
static Doubles doubles, pace;
static std::vector<Op> ops;
static std::vector<Side> sides;
static std::vector<s4u::Mailbox*> unused;
static std::unordered_map<int64_t, double> latencies;  // by from * ranks + to
static std::unordered_map<int64_t, Sent> sent;         // by base[message] + column
static Doubles finished, waited;
static int64_t messages, mailboxes;

template <class T> static std::vector<T> read(FILE* file)
{
  int64_t n = 0;
  bool good = fread(&n, sizeof n, 1, file) == 1;
  std::vector<T> found(n);
  if (!good || fread(found.data(), sizeof(T), n, file) != size_t(n)) {
    fprintf(stderr, "replay: the input is cut off\n");
    exit(2);
  }
  return found;
}

// The message that a rank knows by a side, and its bytes; 0: there is none.
static std::pair<int64_t, int64_t> known(int64_t rank, int64_t m, int64_t from)
{
  int64_t column = !wide[m] ? 0 : from < 0 ? rank : ints[from + rank];
  return {base[m] + column, ints[bytes[m] + column]};
}

static void post(int64_t rank, const Op& op)
{
  static void* parcel;  // nothing is in it
  bool sends = op.kind == SEND;
  auto [key, size] = known(rank, op.a, sends ? -1 : op.b);
  if (size == 0)
    return;
  Sent& message = sent[key];
  if (!message.mailbox && unused.empty())
    unused.push_back(s4u::Mailbox::by_name(std::to_string(mailboxes++)));
  if (!message.mailbox) {  // still: other actors went on meanwhile
    message.mailbox = unused.back();
    unused.pop_back();
    int64_t column = key - base[op.a], source = wide[op.a] ? column : op.c;
    message.latency = latencies.at(source * int64_t(finished.size()) + ints[to[op.a] + column]);
    messages++;
  }
  auto comm = sends ? message.mailbox->put_async(&parcel, uint64_t(size))
                    : message.mailbox->get_async(&parcel);
  sent[key].comm[!sends] = comm;
}

// When all is there that a rank waits for.
static double arrival(int64_t rank, const Op& op)
{
  double ready = 0;
  for (const Side *side = &sides[op.a], *last = side + op.b; side != last; side++) {
    auto [key, size] = known(rank, side->message, side->from);
    if (size == 0)
      continue;
    auto comm = sent[key].comm[side->from >= 0];
    comm->wait();
    Sent& message = sent[key];
    ready = std::max(ready, comm->get_finish_time() + message.latency);
    if (--message.left == 0) {
      unused.push_back(message.mailbox);
      sent.erase(key);
    }
  }
  return ready;
}

static void run(int64_t rank)
{
  double now = 0, idle = 0;  // SimGrid's clock is behind until others could tell
  for (int64_t i = begin[rank]; i < end[rank]; i++) {
    const Op& op = ops[i];
    int64_t column = op.wide ? rank : 0;
    if (op.kind == SPEND) {
      now += doubles[op.a + column] * pace[rank];
    } else if (op.kind == WAIT) {
      double ready = std::max(now, arrival(rank, op));
      idle += ready - now;
      double work = op.c < 0 ? 0 : doubles[op.c + column] * pace[rank];
      double paid = std::min(idle, work);  // it worked for these messages while it waited
      idle -= paid;
      ready += work - paid;
      waited[rank] += ready - now;
      now = ready;
    } else {
      if (now > s4u::Engine::get_clock())
        s4u::this_actor::sleep_until(now);
      post(rank, op);
    }
  }
  finished[rank] = now;
}

int main(int argc, char** argv)
{
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a driver that is killed leaves nothing running
  s4u::Engine engine(&argc, argv);
  FILE* input = argc == 3 ? fopen(argv[1], "rb") : nullptr;
  FILE* output = input ? fopen(argv[2], "wb") : nullptr;
  if (!output) {
    fprintf(stderr, "usage: replay IN OUT\n");
    return 2;
  }
  pace = read<double>(input);  // of each rank
  size_t size = pace.size();
  auto bandwidth = read<double>(input);
  auto from = read<int64_t>(input), towards = read<int64_t>(input);
  auto latency = read<double>(input);
  auto first = read<int64_t>(input), passed = read<int64_t>(input);  // links of each route
  ints = read<int64_t>(input);
  doubles = read<double>(input);
  wide = read<int64_t>(input), base = read<int64_t>(input);
  to = read<int64_t>(input), bytes = read<int64_t>(input);
  ops = read<Op>(input);
  sides = read<Side>(input);
  begin = read<int64_t>(input), end = read<int64_t>(input);  // of each rank's ops
  fclose(input);

  std::vector<s4u::Host*> hosts;
  auto* zone = s4u::create_full_zone("all");
  std::vector<s4u::Link*> links;
  for (size_t i = 0; i < size; i++)
    hosts.push_back(zone->create_host("h" + std::to_string(i), 1.0));
  for (size_t i = 0; i < bandwidth.size(); i++)
    links.push_back(zone->create_link("l" + std::to_string(i), bandwidth[i])->seal());
  for (size_t i = 0; i < from.size(); i++) {
    std::vector<s4u::LinkInRoute> path;
    for (int64_t k = first[i]; k < first[i + 1]; k++)
      path.emplace_back(links[passed[k]]);
    zone->add_route(hosts[from[i]]->get_netpoint(), hosts[towards[i]]->get_netpoint(), nullptr,
                    nullptr, path, false);
    latencies[from[i] * int64_t(size) + towards[i]] = latency[i];
  }
  zone->seal();
  finished.resize(size), waited.resize(size);
  for (size_t i = 0; i < size; i++) {
    s4u::Actor::create("a" + std::to_string(i), hosts[i], [i] { run(int64_t(i)); });
  }
  engine.run();

  long kilobytes = 0;  // at most; getrusage would tell of this process's parent, too
  char line[256];
  FILE* status = fopen("/proc/self/status", "r");
  while (status && fgets(line, sizeof line, status) && !sscanf(line, "VmHWM: %ld", &kilobytes)) {
  }
  Doubles figures{1024.0 * double(kilobytes), double(messages)};
  bool good = true;
  for (const Doubles* x : {&finished, &waited, &figures})
    good &= fwrite(x->data(), sizeof(double), x->size(), output) == x->size();
  good &= fclose(output) == 0;
  _exit(good ? 0 : 1);  // to take SimGrid's actors and links apart takes long
}
