// SPDX-License-Identifier: Apache-2.0
//! A node with a namespace, an uplink, a directory store with peers, and an agent as a process. What must be in its kernel is computed here
//! independently of the agent.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value as Json, json};

use crate::exe::weft_exe;
pub use crate::namespace::{add_uplink, alone, bridge, ip, run};

/// How long a test waits for a condition. A repair takes milliseconds, but this machine may be busy with much else. The limit may
/// be this long because the audit is an hour away: only the awaited cause can end the wait.
pub const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Vxlan,
    VxlanDual,
    HostGw,
    HostGwDual,
    /// IPv6 without IPv4.
    VxlanV6,
    /// IPv6 without IPv4.
    HostGwV6,
    /// Both families with `DirectRouting`. Peers on the link have direct routes, and those behind a router are reached over the devices.
    DirectDual,
}

impl Kind {
    pub fn dual(self) -> bool {
        matches!(self, Kind::VxlanDual | Kind::HostGwDual | Kind::DirectDual)
    }

    pub fn vxlan(self) -> bool {
        matches!(self, Kind::Vxlan | Kind::VxlanDual | Kind::VxlanV6 | Kind::DirectDual)
    }

    /// Returns the address families of its pods: false is IPv4, true is IPv6.
    pub fn families(self) -> &'static [bool] {
        match self {
            Kind::Vxlan | Kind::HostGw => &[false],
            Kind::VxlanDual | Kind::HostGwDual | Kind::DirectDual => &[false, true],
            Kind::VxlanV6 | Kind::HostGwV6 => &[true],
        }
    }

    /// Returns the net-conf of its cluster.
    fn config(self) -> Json {
        let mut config = json!({"Backend": {"Type": self.name()}});
        if self.families().contains(&false) {
            config["Network"] = json!("10.5.0.0/16");
        } else {
            config["EnableIPv4"] = json!(false);
        }
        if self.families().contains(&true) {
            config["EnableIPv6"] = json!(true);
            config["IPv6Network"] = json!("fd05::/48");
        }
        if self == Kind::DirectDual {
            config["Backend"]["DirectRouting"] = json!(true);
        }
        config
    }

    pub fn name(self) -> &'static str {
        if self.vxlan() { "vxlan" } else { "host-gw" }
    }

    /// Returns its devices with the size of the outer header.
    pub fn devices(self) -> &'static [(&'static str, u32)] {
        match self {
            Kind::Vxlan => &[("flannel.1", 50)],
            Kind::VxlanDual | Kind::DirectDual => &[("flannel.1", 50), ("flannel-v6.1", 70)],
            Kind::VxlanV6 => &[("flannel-v6.1", 70)],
            Kind::HostGw | Kind::HostGwDual | Kind::HostGwV6 => &[],
        }
    }

    /// Returns its device for one family with the size of the outer header.
    pub fn device(self, v6: bool) -> Option<(&'static str, u32)> {
        let name = if v6 { "flannel-v6.1" } else { "flannel.1" };
        self.devices().iter().find(|device| device.0 == name).copied()
    }
}

/// The first [`Lease::host`] that is reached over a router.
pub const BEHIND_A_ROUTER: u32 = 240;

/// A lease. Number 1 is our own.
#[derive(Debug, Clone)]
pub struct Lease {
    /// The third part of the subnet.
    pub number: u32,
    /// The last part of the published addresses. From [`BEHIND_A_ROUTER`] on they are not on the link of the uplink.
    pub host: u32,
    /// The last byte of the VTEP MACs.
    pub mac: u32,
}

impl Lease {
    pub fn new(number: u32) -> Lease {
        Lease { number, host: number, mac: number }
    }

    pub fn mac(&self, v6: bool) -> String {
        format!("02:00:00:00:0{}:{:02x}", if v6 { 6 } else { 4 }, self.mac)
    }

    pub fn public(&self, v6: bool) -> String {
        match (self.host >= BEHIND_A_ROUTER, v6) {
            (false, false) => format!("10.0.0.{}", self.host),
            (false, true) => format!("fd00::{:x}", self.host),
            (true, false) => format!("10.9.0.{}", self.host),
            (true, true) => format!("fd09::{:x}", self.host),
        }
    }

    /// Returns the network address of the subnet.
    pub fn first(&self, v6: bool) -> String {
        if v6 { format!("fd05:0:0:{:x}::", self.number) } else { format!("10.5.{}.0", self.number) }
    }

    pub fn net(&self, v6: bool) -> String {
        format!("{}/{}", self.first(v6), if v6 { 64 } else { 24 })
    }

    pub fn key(&self, kind: Kind) -> String {
        let key = |v6: &bool| format!("{}-{}", self.first(*v6), if *v6 { 64 } else { 24 });
        kind.families().iter().map(key).collect::<Vec<_>>().join("&")
    }

    pub fn value(&self, kind: Kind) -> Json {
        // flannel writes an IPv4 address in every lease.
        let mut value = json!({"PublicIP": "0.0.0.0", "PublicIPv6": null, "BackendType": kind.name()});
        for v6 in kind.families().iter().copied() {
            value[if v6 { "PublicIPv6" } else { "PublicIP" }] = json!(self.public(v6));
            if kind.vxlan() {
                let data = json!({"VNI": 1, "VtepMAC": self.mac(v6)});
                value[if v6 { "BackendV6Data" } else { "BackendData" }] = data;
            }
        }
        value["Created"] = json!(1000 + self.number);
        value
    }
}

/// How often the agent compared its whole plan with the kernel, by cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passes(BTreeMap<String, u64>);

impl Passes {
    fn of(status: &Json) -> Passes {
        let counts = status["full_passes"].as_object().unwrap();
        Passes(counts.iter().map(|(cause, count)| (cause.clone(), count.as_u64().unwrap())).collect())
    }

    fn kernel(&self) -> u64 {
        self.0.get("kernel").copied().unwrap_or(0)
    }
}

/// A node under test. Its agent ends when this is dropped.
pub struct Site {
    pub kind: Kind,
    dir: tempfile::TempDir,
    /// Peers that must be programmed, by number.
    pub peers: BTreeMap<u32, Lease>,
    /// Our own lease.
    pub own: Lease,
    /// The MTU of the uplink in bytes.
    pub mtu: u32,
    pub resync: &'static str,
    pub flags: Vec<String>,
    /// The flags that choose the uplink.
    pub uplink: String,
    /// The path of subnet.env below the directory of the test.
    pub env: String,
    agent: Option<Child>,
}

impl Site {
    /// Makes a node with twenty peers. The agent does not run yet.
    pub fn new(kind: Kind) -> Site {
        let dir = tempfile::Builder::new().prefix("weft-fault-").tempdir().unwrap();
        fs::create_dir_all(dir.path().join("store/subnets")).unwrap();
        let peers = (2..22).map(|n| (n, Lease::new(n))).collect();
        let own = Lease::new(1);
        let (flags, uplink, env) = (Vec::new(), "--iface=up0".to_owned(), "run/subnet.env".to_owned());
        let site = Site { kind, dir, peers, own, mtu: 1500, resync: "1h", flags, uplink, env, agent: None };
        fs::write(site.path("store/config.json"), kind.config().to_string()).unwrap();
        for lease in site.peers.values().chain([&site.own]) {
            site.put(&lease.key(kind), &lease.value(kind).to_string());
        }
        site
    }

    /// Makes the same, with a running agent and everything in place.
    pub fn running(kind: Kind) -> Site {
        let mut site = Site::new(kind);
        site.start();
        site.healed("the start");
        site
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn env_file(&self) -> PathBuf {
        self.path(&self.env)
    }

    pub fn lease_file(&self, key: &str) -> PathBuf {
        self.path("store/subnets").join(format!("{key}.json"))
    }

    /// Writes a lease file as synchronising tools do: under another name, which is then changed.
    pub fn put(&self, key: &str, value: &str) {
        let aside = self.path("store/subnets/.aside");
        fs::write(&aside, value).unwrap();
        fs::rename(aside, self.lease_file(key)).unwrap();
    }

    pub fn put_peer(&mut self, lease: Lease) {
        self.put(&lease.key(self.kind), &lease.value(self.kind).to_string());
        self.peers.insert(lease.number, lease);
    }

    pub fn remove_peer(&mut self, number: u32) {
        let lease = self.peers.remove(&number).unwrap();
        fs::remove_file(self.lease_file(&lease.key(self.kind))).unwrap();
    }

    pub fn own_lease(&self) -> Option<Json> {
        let text = fs::read_to_string(self.lease_file(&self.own.key(self.kind))).ok()?;
        serde_json::from_str(&text).ok()
    }

    pub fn weft(&self, command: &str) -> Command {
        self.weft_on(command, "run/weft.sock")
    }

    pub fn weft_on(&self, command: &str, socket: &str) -> Command {
        let mut weft = Command::new("setpriv");
        weft.args(["--pdeathsig", "KILL"]).arg(weft_exe()).arg(command);
        weft.arg(format!("--socket={}", self.path(socket).display())).stdin(Stdio::null());
        weft
    }

    pub fn start(&mut self) {
        assert!(self.agent.is_none(), "it runs");
        let mut command = self.weft("agent");
        // The peers of a site are leases without nodes, so nobody would answer.
        command.arg("--probe=off");
        command.arg(format!("--store=dir:{}", self.path("store").display())).arg(&self.uplink);
        command.arg(format!("--subnet-file={}", self.env_file().display())).arg(self.state_dir());
        command.arg(format!("--resync={}", self.resync)).arg("-v=1").args(&self.flags);
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("log")).unwrap();
        self.agent = Some(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.agent.as_ref().unwrap().id()).unwrap())
    }

    /// Ends the agent, and returns its exit code.
    pub fn stop(&mut self, signal: Signal) -> Option<i32> {
        kill(self.pid(), signal).unwrap();
        self.agent.take().unwrap().wait().unwrap().code()
    }

    pub fn cleanup(&self) -> Output {
        let mut cleanup = self.weft("cleanup");
        cleanup.arg(format!("--subnet-file={}", self.env_file().display())).arg(self.state_dir()).output().unwrap()
    }

    /// The default directory is that of the host, and the test must leave nothing in it.
    fn state_dir(&self) -> String {
        format!("--state-dir={}", self.path("agent-state").display())
    }

    pub fn status(&self) -> Option<Json> {
        let out = self.weft("status").args(["-o", "json"]).output().unwrap();
        out.status.success().then(|| serde_json::from_slice(&out.stdout).unwrap())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn expected_env(&self) -> String {
        let mut text = String::new();
        let overhead = self.kind.devices().iter().map(|device| device.1).max().unwrap_or(0);
        for v6 in self.kind.families().iter().copied() {
            text += &if v6 {
                format!("FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:{:x}::1/64\n", self.own.number)
            } else {
                format!("FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.{}.1/24\n", self.own.number)
            };
        }
        text + &format!("FLANNEL_MTU={}\nFLANNEL_IPMASQ=false\n", self.mtu - overhead)
    }

    /// Returns what must be in the kernel, as lines.
    pub fn expected(&self) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        for v6 in self.kind.families().iter().copied() {
            let network = if v6 { "fd05::/48" } else { "10.5.0.0/16" };
            lines.extend(fence(network));
            let device = self.kind.device(v6);
            if let Some((dev, overhead)) = device {
                let (mtu, mac, local) = (self.mtu - overhead, self.own.mac(v6), self.own.public(v6));
                lines.insert(format!("link {dev} up mtu {mtu} {mac} id 1 local {local} dev up0 port 8472"));
                lines.insert(format!("addr {}/{} dev {dev}", self.own.first(v6), if v6 { 128 } else { 32 }));
            }
            for peer in self.peers.values() {
                let (net, first, public, mac) = (peer.net(v6), peer.first(v6), peer.public(v6), peer.mac(v6));
                let direct = self.kind == Kind::DirectDual && peer.host < BEHIND_A_ROUTER;
                match device.filter(|_| !direct) {
                    Some((dev, _)) => {
                        lines.insert(format!("route {net} via {first} dev {dev}"));
                        lines.insert(format!("neigh {first} {mac} dev {dev}"));
                        lines.insert(format!("fdb {mac} dst {public} dev {dev}"));
                    }
                    None => {
                        lines.insert(format!("route {net} via {public} dev up0"));
                    }
                }
            }
        }
        lines
    }

    /// Waits until the kernel contains exactly what it must, subnet.env is right, and the agent reports that it is ready.
    pub fn healed(&mut self, what: &str) {
        let expected = self.expected();
        let env = self.expected_env();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let observed = observed();
            let file = fs::read_to_string(self.env_file()).unwrap_or_default();
            let right = observed == expected && file == env;
            if right && self.status().is_some_and(|status| status["ready"] == json!(true)) {
                return;
            }
            let ended = self.agent.as_mut().and_then(|agent| agent.try_wait().unwrap());
            if Instant::now() < deadline && ended.is_none() {
                continue;
            }
            let missing: Vec<_> = expected.difference(&observed).collect();
            let surplus: Vec<_> = observed.difference(&expected).collect();
            let (status, log) = (self.status(), self.log());
            panic!(
                "not healed after {what}: missing {missing:#?}, too much {surplus:#?}\n{file}\n{ended:?}\n{status:#?}\n{log}"
            );
        }
    }

    /// Waits until the agent has nothing left to do: the next full pass is the audit, which comes after an hour, and several answers in a
    /// row report no further full pass. So a fault that is made now cannot be healed by other work.
    pub fn quiet(&self) -> Passes {
        assert_eq!(self.resync, "1h", "an audit would heal everything");
        let mut seen: Vec<Passes> = Vec::new();
        self.until("the agent to be quiet", |site| {
            let status = site.status();
            // If an audit was brought forward in the middle of a test, less time than this is left.
            let idle = status.as_ref().is_some_and(|status| status["next_audit_s"].as_f64().unwrap() > 3000.0);
            // The kernel announces an IPv6 address again when it has checked it, a second or two after its link is up.
            let idle = idle && ip("-6 -o addr show tentative").is_empty();
            let passes = status.as_ref().map(Passes::of).filter(|_| idle);
            let again = passes.is_some() && passes == seen.last().cloned();
            if !again {
                seen.clear();
            }
            seen.extend(passes);
            seen.len() >= 5
        });
        seen.pop().unwrap()
    }

    /// Does the same as [`Site::healed`], and checks that there was no full pass. So the kernel's notification about each entry has led to the
    /// repair. `before` is from [`Site::quiet`].
    pub fn healed_by_entries(&mut self, before: &Passes, what: &str) {
        self.healed(what);
        let after = Passes::of(&self.status().unwrap());
        assert_eq!(after, *before, "{what}: healed by a look at everything, not by the notification\n{}", self.log());
    }

    /// Does the same as [`Site::healed`], and checks that a notification about a link or an address has led to a full pass.
    pub fn healed_by_links(&mut self, before: &Passes, what: &str) {
        self.healed(what);
        let after = Passes::of(&self.status().unwrap());
        assert!(
            after.kernel() > before.kernel(),
            "{what}: no notification led to a look at everything\n{}",
            self.log()
        );
    }

    /// Waits until the agent reports that it is ready.
    pub fn ready(&self) {
        self.until("readiness", |site| site.status().is_some_and(|status| status["ready"] == json!(true)));
    }

    /// Waits until the vxlan devices of the node are exactly these, sorted by name.
    pub fn until_devices(&self, what: &str, names: &[&str]) {
        self.until(what, |_| devices() == names);
    }

    /// Waits for a condition.
    pub fn until(&self, what: &str, mut reached: impl FnMut(&Site) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !reached(self) {
            assert!(Instant::now() < deadline, "waited for {what}:\n{:#?}\n{}", self.status(), self.log());
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            // It may have ended already.
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

/// Returns the lines of a fence around this network. Each agent has its own numbers of preferences and tables.
pub fn fence(network: &str) -> [String; 3] {
    let length: u32 = network.split_once('/').unwrap().1.parse().unwrap();
    [
        format!("fence: what main has for {network}, longer than {}", length - 1),
        format!("fence: then, not iif lo, the table of {network}"),
        format!("fence: unreachable {network}"),
    ]
}

/// Returns the rules with our protocol, and the routes of the tables that they name.
fn fences() -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    for family in ["-4", "-6"] {
        let routes = array(&run("ip", &format!("{family} -j route show table all")));
        let tables = |route: &&Json| route["protocol"] == "90" && route["table"].is_string();
        let routes: Vec<&Json> = routes.iter().filter(tables).collect();
        lines.extend(routes.iter().map(|route| format!("fence: {} {}", word(&route["type"]), word(&route["dst"]))));
        let rules = array(&run("ip", &format!("{family} -j rule")));
        let rules: Vec<&Json> = rules.iter().filter(|rule| rule["protocol"] == "90").collect();
        let to = |rule: &Json| format!("{}/{}", word(&rule["dst"]), rule["dstlen"]);
        for rule in &rules {
            if rule["table"] == "main" {
                let longer = &rule["suppress_prefixlen"];
                lines.insert(format!("fence: what main has for {}, longer than {longer}", to(rule)));
                continue;
            }
            let fenced = |route: &&&Json| route["table"] == rule["table"] && route["type"] != "throw";
            let net = routes.iter().find(fenced).map_or("nothing".to_owned(), |route| word(&route["dst"]).to_owned());
            let first =
                rules.iter().find(|first| first["priority"].as_u64() == rule["priority"].as_u64().map(|n| n - 1));
            let then = if first.is_some_and(|first| to(first) == net) { "then" } else { "without a rule before it" };
            let not = if rule.get("not").is_some() { "not " } else { "" };
            lines.insert(format!("fence: {then}, {not}iif {}, the table of {net}", word(&rule["iif"])));
        }
    }
    lines
}

/// Returns what is in the kernel on flannel's devices, and the routes and rules with our protocol.
pub fn observed() -> BTreeSet<String> {
    let mut lines = fences();
    for link in array(&run("ip", "-j -d link show type vxlan")).iter().filter(|link| is_ours(&link["ifname"])) {
        let data = &link["linkinfo"]["info_data"];
        let local = data["local"].as_str().or(data["local6"].as_str()).unwrap_or("-");
        let up = if text(&link["flags"]).contains("\"UP\"") { "up" } else { "down" };
        // `ip` shows 0, or nothing, for the TTL of the host.
        let ttl = data["ttl"].as_u64().filter(|ttl| *ttl != 0).map(|ttl| format!(" ttl {ttl}")).unwrap_or_default();
        lines.insert(format!(
            "link {} {up} mtu {} {} id {} local {local} dev {} port {}{ttl}",
            word(&link["ifname"]),
            link["mtu"],
            word(&link["address"]),
            data["id"],
            word(&data["link"]),
            data["port"]
        ));
    }
    for link in array(&run("ip", "-j addr")).iter().filter(|link| is_ours(&link["ifname"])) {
        for addr in link["addr_info"].as_array().unwrap().iter().filter(|addr| addr["scope"] != "link") {
            lines.insert(format!("addr {}/{} dev {}", word(&addr["local"]), addr["prefixlen"], word(&link["ifname"])));
        }
    }
    for family in ["-4", "-6"] {
        for route in array(&run("ip", &format!("{family} -j route"))) {
            let protocol = word(&route["protocol"]);
            if route["type"] == "unreachable" && protocol == "90" {
                lines.insert(format!("route unreachable {} of the main table", word(&route["dst"])));
            } else if protocol == "90" || (is_ours(&route["dev"]) && protocol != "kernel") {
                let via = route["gateway"].as_str().unwrap_or("-");
                let odd = if protocol == "90" { "" } else { " of another protocol" };
                lines.insert(format!("route {} via {via} dev {}{odd}", word(&route["dst"]), word(&route["dev"])));
            }
        }
    }
    for entry in array(&run("bridge", "-j fdb show")).iter().filter(|entry| is_ours(&entry["ifname"])) {
        let mac = word(&entry["mac"]);
        lines.insert(format!("fdb {mac} dst {} dev {}", word(&entry["dst"]), word(&entry["ifname"])));
    }
    for entry in array(&run("ip", "-j neigh")).iter().filter(|entry| is_ours(&entry["dev"])) {
        if text(&entry["state"]).contains("PERMANENT") {
            lines.insert(format!(
                "neigh {} {} dev {}",
                word(&entry["dst"]),
                word(&entry["lladdr"]),
                word(&entry["dev"])
            ));
        }
    }
    lines
}

/// Returns the names of the vxlan devices in order.
pub fn devices() -> Vec<String> {
    let links = array(&run("ip", "-j link show type vxlan"));
    let mut names: Vec<String> = links.iter().map(|link| link["ifname"].as_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

fn is_ours(name: &Json) -> bool {
    name.as_str().is_some_and(|name| name.starts_with("flannel"))
}

fn word(value: &Json) -> &str {
    value.as_str().unwrap_or("-")
}

fn text(value: &Json) -> String {
    value.to_string()
}

pub fn array(text: &str) -> Vec<Json> {
    if text.trim().is_empty() {
        return Vec::new();
    }
    let all: Vec<Json> = serde_json::from_str(text).unwrap();
    // `ip` prints an empty object for each link that a filter leaves out.
    all.into_iter().filter(|one| one.as_object().is_some_and(|one| !one.is_empty())).collect()
}

/// Runs a test in a fresh namespace: lo, and the pair up0 (10.0.0.1/24, fd00::1/64) and far0, all up.
pub fn in_namespace(test: impl FnOnce() + Send) {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        test();
    });
}

/// Makes one test for each backend that is named.
macro_rules! each {
    ($($test:ident: $($kind:ident)+;)+) => {
        $(mod $test {
            $(#[test]
            #[allow(non_snake_case, reason = "named after the variant")]
            fn $kind() {
                crate::site::in_namespace(|| super::$test(crate::site::Kind::$kind));
            })+
        })+
    };
}
pub(crate) use each;
