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

struct Op {  // of message a, or of b messages from side a on
  int64_t kind, a, b;
};

struct Sent {  // one message, while somebody needs it
  s4u::Mailbox* mailbox = nullptr;
  s4u::CommPtr comm[2];  // as the sender knows it, and the receiver
  int left = 2;          // sides that may still wait for it
};

static Ints bytes, sides, begin, end;
static Doubles latency, seconds;
static std::vector<Op> ops;
static std::vector<s4u::Mailbox*> unused;
static std::unordered_map<int64_t, Sent> sent;  // by message
static Doubles finished, waited;
static int64_t mailboxes;

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

static void post(const Op& op)
{
  static void* parcel;  // nothing is in it
  bool sends = op.kind == SEND;
  Sent& message = sent[op.a];
  if (!message.mailbox && unused.empty())
    unused.push_back(s4u::Mailbox::by_name(std::to_string(mailboxes++)));
  if (!message.mailbox) {  // still: other actors went on meanwhile
    message.mailbox = unused.back();
    unused.pop_back();
  }
  auto comm = sends ? message.mailbox->put_async(&parcel, uint64_t(bytes[op.a]))
                    : message.mailbox->get_async(&parcel);
  sent[op.a].comm[!sends] = comm;
}

// When all is there that a rank waits for: messages that it sent (2 m), or receives (2 m + 1).
static double arrival(const Op& op)
{
  double ready = 0;
  for (int64_t i = op.a; i < op.a + op.b; i++) {
    int64_t m = sides[i] / 2;
    auto comm = sent[m].comm[sides[i] % 2];
    comm->wait();
    Sent& message = sent[m];
    ready = std::max(ready, comm->get_finish_time() + latency[m]);
    if (--message.left == 0) {
      unused.push_back(message.mailbox);
      sent.erase(m);
    }
  }
  return ready;
}

static void run(int64_t rank)
{
  double now = 0, idle = 0;  // SimGrid's clock is behind until others could tell
  for (int64_t i = begin[rank]; i < end[rank]; i++) {
    const Op& op = ops[i];
    double work = seconds[i];
    if (op.kind == SPEND) {
      now += work;
    } else if (op.kind == WAIT) {
      double ready = std::max(now, arrival(op));
      idle += ready - now;
      double paid = std::min(idle, work);  // it worked for these messages while it waited
      idle -= paid;
      ready += work - paid;
      waited[rank] += ready - now;
      now = ready;
    } else {
      if (now > s4u::Engine::get_clock())
        s4u::this_actor::sleep_until(now);
      post(op);
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
  auto bandwidth = read<double>(input);
  auto from = read<int64_t>(input), towards = read<int64_t>(input);
  auto first = read<int64_t>(input), passed = read<int64_t>(input);  // links of each route
  bytes = read<int64_t>(input), latency = read<double>(input);       // of each message
  ops = read<Op>(input), seconds = read<double>(input);
  sides = read<int64_t>(input);
  begin = read<int64_t>(input), end = read<int64_t>(input);  // of each rank's ops
  size_t size = begin.size();
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
  }
  zone->seal();
  finished.resize(size), waited.resize(size);
  for (size_t i = 0; i < size; i++) {
    s4u::Actor::create("a" + std::to_string(i), hosts[i], [i] { run(int64_t(i)); });
  }
  engine.run();

  bool good = true;
  for (const Doubles* x : {&finished, &waited})
    good &= fwrite(x->data(), sizeof(double), x->size(), output) == x->size();
  good &= fclose(output) == 0;
  _exit(good ? 0 : 1);  // to take SimGrid's actors and links apart takes long
}
