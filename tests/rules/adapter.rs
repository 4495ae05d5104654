// SPDX-License-Identifier: Apache-2.0
//! The rules in iptables, in the real kernel. Each test has a new namespace, and most run once for each flavour.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ipnet::IpNet;

use crate::namespace::alone;
use crate::patience::PATIENCE;
use crate::program::write_program;
use weft::firewall::choice::{Choice, Chosen, Mode, Survey};
use weft::firewall::iptables::{Iptables, remove_flannel_chains};
use weft::firewall::other_programs::OtherPrograms;
use weft::firewall::packet_filter::{Ensured, PacketFilter};
use weft::firewall::reconciler::Others;
use weft::instance::Instance;
use weft::observe::problem::Problem;
use weft_backends::traffic_rules::{Masquerade, Policy, Rules, rules};
use weft_subnet::cidr::Subnets;

const FLAVOURS: [&str; 2] = ["nft", "legacy"];

/// Runs a test for each flavour in a namespace of its own. The chain of kubelet there shows which flavour the node uses.
fn each_flavour(test: impl AsyncFn(&str) + Send + Sync) {
    for flavour in FLAVOURS {
        in_namespace(async || {
            hint(flavour);
            test(flavour).await;
        });
    }
}

fn in_namespace(test: impl AsyncFn() + Send + Sync) {
    alone(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    });
}

fn hint(flavour: &str) {
    restore(flavour, "", "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\nCOMMIT\n");
}

fn restore(flavour: &str, six: &str, text: &str) {
    let script = format!("ip{six}tables-{flavour}-restore --noflush -w 20 <<'END'\n{text}END\n");
    sh(&script);
}

fn sh(script: &str) -> String {
    let out = Command::new("sh").args(["-c", script]).output().unwrap();
    assert!(out.status.success(), "{script}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Returns the rules and chains of one flavour, in both families.
fn lines(flavour: &str) -> Vec<String> {
    let mut all = Vec::new();
    for six in ["", "6"] {
        let text = sh(&format!("ip{six}tables-{flavour}-save"));
        let kept = text.lines().filter(|line| line.starts_with("-A") || line.starts_with(':'));
        all.extend(kept.map(|line| line.split(" [").next().unwrap_or_default().to_owned()));
    }
    all
}

fn lines_with(flavour: &str, word: &str) -> Vec<String> {
    let mut all = lines(flavour);
    all.retain(|line| line.contains(word));
    all
}

fn dual() -> Rules {
    dual_with(vec!["192.0.2.0/24".parse().unwrap(), "2001:db8::/32".parse().unwrap()])
}

fn dual_with(except: Vec<IpNet>) -> Rules {
    let networks = Subnets { v4: "10.5.0.0/16".parse().ok(), v6: "fd05::/48".parse().ok() };
    let own = Subnets { v4: "10.5.7.0/24".parse().ok(), v6: "fd05:0:0:7::/64".parse().ok() };
    let masquerade = Masquerade {
        fully_random: true,
        except,
        nodes: vec!["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap(), "fd00::1".parse().unwrap()],
    };
    rules(&networks, &own, &Policy { masquerade: Some(masquerade), forward: true })
}

fn instance() -> Instance {
    Instance { name: "weft".to_owned(), file: "/run/flannel/subnet.env".to_owned() }
}

async fn ensure(iptables: &mut impl PacketFilter, rules: &Rules, expected: Ensured, what: &str) {
    assert_eq!(iptables.ensure(rules).await.unwrap(), expected, "{what}");
}

/// iptables-save leaves a network out that contains all addresses.
#[test]
fn exceptions_for_all_addresses_are_written_once() {
    each_flavour(async |flavour| {
        let except = ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap()).to_vec();
        let (rules, mut iptables) = (dual_with(except), Iptables::new(&instance()));
        ensure(&mut iptables, &rules, Ensured::Written, "nothing was there").await;
        ensure(&mut iptables, &rules, Ensured::Unchanged, "all is there").await;
        for net in ["10.5.0.0/16", "fd05::/48"] {
            assert_eq!(lines_with(flavour, &format!("-A WEFT-POSTRTG -s {net} -j RETURN")).len(), 1, "{net}");
        }
    });
}

#[test]
fn rules_are_written_once_and_restored_after_changes() {
    each_flavour(async |flavour| {
        let (rules, mut iptables) = (dual(), Iptables::new(&instance()));
        ensure(&mut iptables, &rules, Ensured::Written, "nothing was there").await;
        let complete = lines_with(flavour, "WEFT");
        // 1 + 3 + 1 + 2 or 1 nodes + 2 of masquerade, 2 of forward, 2 jumps, 2 chains of each family.
        assert_eq!(complete.len(), 15 + 14, "{complete:#?}");
        ensure(&mut iptables, &rules, Ensured::Unchanged, "all is there").await;
        ensure(&mut Iptables::new(&instance()), &rules, Ensured::Unchanged, "a restart").await;
        for damage in [
            "iptables -t nat -F POSTROUTING",
            "iptables -t nat -F",
            "iptables -D FORWARD -j WEFT-FWD",
            "iptables -t nat -D WEFT-POSTRTG 1",
            "iptables -t nat -R WEFT-POSTRTG 2 -s 10.6.0.0/16 -j RETURN",
            "iptables -t nat -A WEFT-POSTRTG -j MASQUERADE",
            "iptables -I FORWARD -j WEFT-FWD",
            "iptables -F FORWARD && iptables -F WEFT-FWD && iptables -X WEFT-FWD",
            "ip6tables -t nat -F && ip6tables -F",
        ] {
            sh(&damage.replace("tables", &format!("tables-{flavour} -w 20")));
            assert_ne!(lines_with(flavour, "WEFT"), complete, "{damage}");
            ensure(&mut iptables, &rules, Ensured::Written, damage).await;
            assert_eq!(lines_with(flavour, "WEFT"), complete, "after {damage}");
            ensure(&mut iptables, &rules, Ensured::Unchanged, damage).await;
        }
        assert_eq!(lines_with(other(flavour), "WEFT"), [""; 0], "nothing in the other flavour");
    });
}

fn other(flavour: &str) -> &'static str {
    if flavour == "nft" { "legacy" } else { "nft" }
}

#[test]
fn unwanted_rules_are_removed_and_those_of_other_programs_stay() {
    each_flavour(async |flavour| {
        let foreign = "*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\nCOMMIT\n\
                       *filter\n:FORWARD DROP [0:0]\n-A FORWARD -i eth1 -j ACCEPT\n-A FORWARD -j REJECT\nCOMMIT\n";
        restore(flavour, "", foreign);
        restore(flavour, "6", foreign);
        let before = lines(flavour);
        let (rules, mut iptables) = (dual(), Iptables::new(&instance()));
        ensure(&mut iptables, &rules, Ensured::Written, "nothing was there").await;
        let forward = lines_with(flavour, "-A FORWARD");
        let expected = ["-i eth1 -j ACCEPT", "-j WEFT-FWD", "-j REJECT"].repeat(2);
        assert!(
            forward.iter().zip(expected).all(|(line, part)| line.contains(part)),
            "our jump is before the last rule: {forward:#?}"
        );
        ensure(&mut iptables, &rules, Ensured::Unchanged, "all is there").await;

        let mut less = rules.clone();
        less.families[0].masquerade.clear();
        less.families.truncate(1);
        ensure(&mut iptables, &less, Ensured::Written, "no masquerade, no IPv6").await;
        let left = lines_with(flavour, "WEFT");
        assert!(left.len() == 4 && left.iter().all(|line| line.contains("WEFT-FWD")), "{left:#?}");
        ensure(&mut iptables, &Rules::default(), Ensured::Written, "no rules").await;
        assert_eq!(lines(flavour), before);
        ensure(&mut iptables, &Rules::default(), Ensured::Unchanged, "no rules").await;

        ensure(&mut iptables, &rules, Ensured::Written, "all again").await;
        assert!(iptables.remove().await.unwrap());
        assert!(!iptables.remove().await.unwrap());
        assert_eq!(lines(flavour), before);
    });
}

#[test]
fn two_agents_keep_their_own_chains() {
    each_flavour(async |flavour| {
        let second = Instance { name: "weft-1a2b3c4d".to_owned(), file: "/tmp/other.env".to_owned() };
        let (mut one, mut two) = (Iptables::new(&instance()), Iptables::new(&second));
        ensure(&mut one, &dual(), Ensured::Written, "one").await;
        ensure(&mut two, &dual(), Ensured::Written, "two").await;
        ensure(&mut one, &dual(), Ensured::Unchanged, "one").await;
        assert!(two.remove().await.unwrap());
        ensure(&mut one, &dual(), Ensured::Unchanged, "one").await;
        assert_eq!(lines_with(flavour, "1A2B3C4D"), [""; 0]);
    });
}

#[test]
fn rules_move_when_the_node_changes_its_flavour() {
    each_flavour(async |flavour| {
        ensure(&mut Iptables::new(&instance()), &dual(), Ensured::Written, "first").await;
        sh(&format!("iptables-{flavour} -w 20 -t mangle -X KUBE-IPTABLES-HINT"));
        hint(other(flavour));
        let mut iptables = Iptables::new(&instance());
        ensure(&mut iptables, &dual(), Ensured::Written, "in the other").await;
        assert!(iptables.describe().contains(other(flavour)), "{}", iptables.describe());
        assert_eq!(lines_with(flavour, "WEFT"), [""; 0], "nothing is left behind");
        assert_eq!(lines_with(other(flavour), "WEFT").len(), 29);
    });
}

#[test]
fn flannels_chains_are_removed_and_others_stay() {
    each_flavour(async |flavour| {
        let theirs = "*nat\n:FLANNEL-POSTRTG - [0:0]\n:OTHER - [0:0]\n-A POSTROUTING -j OTHER\n\
                      -A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n\
                      -A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment \"flanneld masq\" -j RETURN\n\
                      COMMIT\n*filter\n:FLANNEL-FWD - [0:0]\n\
                      -A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\nCOMMIT\n";
        restore(flavour, "", theirs);
        restore(flavour, "6", theirs);
        let removed = remove_flannel_chains().await.unwrap();
        assert_eq!(removed.len(), 4, "{removed:?}");
        assert_eq!(lines_with(flavour, "FLANNEL"), [""; 0]);
        assert_eq!(lines_with(flavour, "OTHER").len(), 4, "others stay");
        assert_eq!(remove_flannel_chains().await.unwrap(), [""; 0]);
    });
}

/// A write in the other flavour does not count as a restored rule.
#[test]
fn accepts_are_written_in_the_other_flavour_if_its_policy_drops() {
    each_flavour(async |flavour| {
        let mut iptables = Iptables::new(&instance());
        ensure(&mut iptables, &dual(), Ensured::Written, "nothing was there").await;
        sh(&format!("iptables-{} -w 20 -P FORWARD DROP", other(flavour)));
        ensure(&mut iptables, &dual(), Ensured::Unchanged, "ours are as they were").await;
        assert_eq!(lines_with(other(flavour), "WEFT").len(), 4, "a chain, its jump, two accepts");
    });
}

async fn chosen(nftables: Option<bool>) -> Chosen {
    Chosen::now(Choice::Auto, nftables, Survey::begin(Choice::Auto)).await
}

/// At boot the agent starts first. What kube-proxy writes later decides without a restart.
#[test]
fn programs_that_start_later_change_the_choice() {
    for (script, mode) in [
        ("iptables-legacy -w 20 -t nat -N KUBE-SERVICES", Mode::Iptables),
        ("iptables-nft -w 20 -t nat -N KUBE-SERVICES", Mode::Iptables),
    ] {
        in_namespace(async || {
            let mut chosen = chosen(None).await;
            assert_eq!(chosen.mode(), Mode::Nft);
            sh(script);
            let every = Duration::from_millis(20);
            tokio::time::timeout(PATIENCE, chosen.changed(every)).await.unwrap();
            assert_eq!(chosen.mode(), mode, "{script}");
            assert!(tokio::time::timeout(every * 5, chosen.changed(every)).await.is_err(), "the choice is final");
        });
    }
}

/// What the node has decides about the choice. To read it changes nothing.
#[test]
fn what_the_node_uses_is_chosen() {
    let kube_table = "nft add table ip kube-proxy";
    let docker = "iptables-nft -w 20 -P FORWARD DROP";
    for (what, script, mode) in [
        ("nothing", "", Mode::Nft),
        ("kube-proxy in nftables mode", kube_table, Mode::Nft),
        ("the same, and Docker", &format!("{kube_table}; {docker}"), Mode::Nft),
        ("kube-proxy in iptables mode", "iptables-nft -w 20 -t nat -N KUBE-SERVICES", Mode::Iptables),
        ("the same in legacy", "iptables-legacy -w 20 -t nat -N KUBE-SERVICES", Mode::Iptables),
        ("the same in IPv6 alone", "ip6tables-legacy -w 20 -t nat -N KUBE-SERVICES", Mode::Iptables),
        ("kubelet alone", "iptables-nft -w 20 -t mangle -N KUBE-KUBELET-CANARY", Mode::Nft),
        ("Docker", docker, Mode::Iptables),
        ("a rule", "iptables-legacy -w 20 -A FORWARD -i eth1 -j ACCEPT", Mode::Iptables),
    ] {
        in_namespace(async || {
            sh(script);
            let traces = || {
                sh("cat /proc/thread-self/net/ip_tables_names /proc/thread-self/net/ip6_tables_names; nft list ruleset")
            };
            let before = traces();
            let decided = async |nftables| chosen(nftables).await.mode();
            assert_eq!(decided(None).await, mode, "{what}");
            assert_eq!(traces(), before, "{what}");
            assert_eq!(decided(Some(true)).await, Mode::Nft, "{what}");
            assert_eq!(decided(Some(false)).await, Mode::Iptables, "{what}");
        });
    }
}

/// At boot nothing shows yet which flavour the node uses. It is looked at again after 30 s.
#[test]
fn the_flavour_is_chosen_again_while_nothing_shows_which_one_is_used() {
    in_namespace(async || {
        let (rules, mut iptables) = (dual(), Iptables::new(&instance()));
        ensure(&mut iptables, &rules, Ensured::Written, "no flavour has rules yet").await;
        assert!(iptables.describe().contains("iptables-nft"), "{}", iptables.describe());
        hint("legacy");
        ensure(&mut iptables, &rules, Ensured::Unchanged, "it is not looked at each time").await;
        pass(Duration::from_secs(30)).await;
        ensure(&mut iptables, &rules, Ensured::Written, "kubelet uses the other flavour").await;
        assert!(iptables.describe().contains("iptables-legacy"), "{}", iptables.describe());
        assert_eq!((lines_with("legacy", "WEFT").len(), lines_with("nft", "WEFT").len()), (29, 0));
    });
}

/// Lets the clock of the agent go on by this time.
async fn pass(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

/// In a process that [`in_own_process`] started, the directory of the test.
const OWN_PROCESS: &str = "WEFT_TEST_OWN_PROCESS";

/// Runs this test again in a process of its own, in a new namespace and with this PATH. It then calls `test`.
fn in_own_process(name: &str, path: &OsStr, dir: &Path) {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("adapter::{name}"), "--nocapture"]).env("PATH", path).env(OWN_PROCESS, dir);
    let out = child.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}

fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

#[test]
fn programs_that_do_not_know_random_fully_get_rules_without_it() {
    if std::env::var_os(OWN_PROCESS).is_some() {
        return block_on(async {
            let (rules, mut iptables) = (dual(), Iptables::new(&instance()));
            ensure(&mut iptables, &rules, Ensured::Written, "nothing was there").await;
            ensure(&mut iptables, &rules, Ensured::Unchanged, "all is there").await;
        });
    }
    alone(|| {
        let dir = tempfile::tempdir().unwrap();
        let (refused, flags) = (dir.path().join("refused"), dir.path().join("flags"));
        for program in ["iptables-legacy", "ip6tables-legacy"] {
            let real = |end: &str| sh(&format!("command -v {program}-{end}")).trim().to_owned();
            let restore = format!(
                "#!/bin/sh\ninput=$(/bin/cat)\necho \"$@\" >> {}\ncase \"$input\" in *random-fully*) echo $0 >> {}; \
                 echo 'iptables-restore: unrecognized option --random-fully' >&2; exit 2;; esac\n\
                 printf '%s\\n' \"$input\" | {} \"$@\"\n",
                flags.display(),
                refused.display(),
                real("restore")
            );
            let save = format!("#!/bin/sh\nexec {} \"$@\"\n", real("save"));
            for (end, text) in [("restore", restore), ("save", save)] {
                write_program(&dir.path().join(format!("{program}-{end}")), &text);
            }
        }
        let this = "programs_that_do_not_know_random_fully_get_rules_without_it";
        in_own_process(this, dir.path().as_os_str(), dir.path());
        assert_eq!(std::fs::read_to_string(&refused).unwrap().lines().count(), 1, "it is not tried again");
        let flags = std::fs::read_to_string(&flags).unwrap();
        assert!(flags.lines().count() > 1, "{flags}");
        assert!(flags.lines().all(|line| line == "--noflush -w 5"), "it waits for programs that write: {flags}");
        let masquerade = lines_with("legacy", "MASQUERADE");
        assert!(masquerade.len() == 4 && masquerade.iter().all(|line| !line.contains("random")), "{masquerade:#?}");
    });
}

/// flannel runs beside the agent at first. When it has ended, its rules are removed, though not at each look.
#[test]
fn rules_that_could_not_be_removed_are_tried_again_after_a_minute() {
    if let Some(dir) = std::env::var_os(OWN_PROCESS) {
        return block_on(beside_flannel(Path::new(&dir)));
    }
    alone(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = std::env::var_os("PATH").unwrap();
        in_own_process("rules_that_could_not_be_removed_are_tried_again_after_a_minute", &path, dir.path());
    });
}

async fn beside_flannel(dir: &Path) {
    restore("legacy", "", "*nat\n:FLANNEL-POSTRTG - [0:0]\nCOMMIT\n");
    let flanneld = dir.join("flanneld");
    std::fs::copy(sh("command -v sleep").trim(), &flanneld).unwrap();
    let mut running = tokio::process::Command::new(&flanneld);
    let mut running =
        running.arg("600").stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().unwrap();
    // spawn returns as soon as the child has left the memory of its parent, which is before the kernel gives it the name and the arguments.
    let command = format!("/proc/{}/cmdline", running.id().unwrap());
    let deadline = Instant::now() + PATIENCE;
    while !std::fs::read_to_string(&command).unwrap().starts_with(flanneld.to_str().unwrap()) {
        assert!(Instant::now() < deadline, "{command} does not name flanneld");
    }
    let mut others = OtherPrograms::new(Mode::Iptables, instance());
    let beside = |warnings: &[Problem]| warnings.iter().any(|problem| problem.text.contains("runs beside weft"));
    assert!(beside(&others.settle(&Rules::default()).await));
    running.kill().await.unwrap();
    assert!(beside(&others.settle(&Rules::default()).await), "it is not looked at each time");
    assert_eq!(lines_with("legacy", "FLANNEL").len(), 1);
    pass(Duration::from_secs(60)).await;
    assert!(!beside(&others.settle(&Rules::default()).await));
    assert_eq!(lines_with("legacy", "FLANNEL"), [""; 0]);
}
