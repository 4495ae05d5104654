// SPDX-License-Identifier: Apache-2.0
use std::time::Duration;

use weft_backends::traffic_rules::Masquerade;

use super::questions::{Output, StatusTask};
use super::*;
use crate::firewall::choice::Choice;
use crate::options::{CniOptions, Fences, NetConfCommands, OnLostLease, RuleOptions};

fn run(line: &str) -> Result<Task, Exit> {
    parse_from(line.split(' ').map(OsString::from), |_| None)
}

fn agent(line: &str) -> AgentTask {
    match run(line) {
        Ok(Task::Agent(task)) => *task,
        other => panic!("{line}: {other:?}"),
    }
}

fn refusal(line: &str) -> Exit {
    run(line).expect_err(line)
}

#[test]
fn the_command_is_well_formed() {
    Cli::command().debug_assert();
}

#[test]
fn defaults_are_flannels() {
    let task = agent("weft agent");
    let Store::Etcd(etcd) = &task.options.store else { panic!("not etcd") };
    assert_eq!(etcd.endpoints, ["http://127.0.0.1:4001", "http://127.0.0.1:2379"]);
    assert_eq!(etcd.prefix, "/coreos.com/network");
    assert_eq!((etcd.key_file.as_ref(), etcd.username.as_ref()), (None, None));
    assert_eq!(etcd.lease_ttl, Duration::from_secs(86_400));
    assert_eq!(etcd.renew_margin, Duration::from_secs(3600));
    assert_eq!(task.options.subnet_file, PathBuf::from("/run/flannel/subnet.env"));
    assert_eq!(task.options.socket, PathBuf::from("/run/flannel/weft.sock"));
    assert_eq!(task.options.wireguard_key, PathBuf::from("/run/flannel/wgkey"));
    assert_eq!(task.options.health, None);
    assert_eq!(task.options.resync, Duration::from_secs(10));
    assert_eq!(task.options.hold_removals, Duration::from_secs(300));
    assert_eq!(task.options.on_lost_lease, OnLostLease::Hold);
    assert!(task.options.nexthop_objects && task.options.manage_sysctls);
    assert!(task.notes.is_empty(), "{:?}", task.notes);
    let fences = Fences { fail_closed: true, blackhole: false };
    assert_eq!(task.options.rules, RuleOptions { forward: true, fences, ..RuleOptions::default() });
}

/// As with Go's flag package. Manifests of flannel, whose chart has no value for --healthz-ip, name flags that weft's chart adds, too.
#[test]
fn of_a_flag_that_is_given_twice_the_last_one_counts() {
    let options = agent("weft agent --healthz-port=1 --ip-masq -healthz-port 2 --ip-masq=false").options;
    assert_eq!(options.health.map(|address| address.port()), Some(2));
    assert_eq!(options.rules.masquerade, None);
    let uplink = agent("flanneld --iface=eth0 --iface eth1 --iface-regex=a --iface-regex=b").options.uplink;
    assert_eq!(uplink.ifaces, ["eth0", "eth1"], "these flags are lists");
    assert_eq!(uplink.regexes.len(), 2);
}

#[test]
fn rules_are_flannels_and_fail_closed_is_weft_s_own_default() {
    let task = agent(
        "weft agent -ip-masq -ip-masq-fully-random-disable --iptables-resync 60 --iptables-forward-rules=false --ip-blackhole-route --firewall nft --guard-tunnel",
    );
    let expected = RuleOptions {
        firewall: Choice::Nft,
        masquerade: Some(Masquerade { fully_random: false, ..Masquerade::default() }),
        forward: false,
        resync: Duration::from_secs(60),
        fences: Fences { fail_closed: true, blackhole: true },
        guard: true,
    };
    assert_eq!(task.options.rules, expected);
    assert_eq!(
        agent("weft agent --ip-masq").options.rules.masquerade,
        Some(Masquerade { fully_random: true, ..Masquerade::default() })
    );
    for (line, closed) in [
        ("flanneld", false),
        ("/opt/bin/flanneld --fail-closed", true),
        ("weft agent --fail-closed=false", false),
        ("weft agent", true),
    ] {
        assert_eq!(agent(line).options.rules.fences.fail_closed, closed, "{line}");
    }
}

#[test]
fn flanneld_is_the_agent_and_go_forms_work() {
    let task = agent(
        "/opt/bin/flanneld -iface=eth0 -iface eth1 -etcd-endpoints http://a:1,http://b:2 -v 4 -ip-masq=false -healthz-port 8081",
    );
    assert_eq!(task.options.uplink.ifaces, ["eth0", "eth1"]);
    assert_eq!(task.verbosity, 4);
    assert_eq!(task.options.health, Some("0.0.0.0:8081".parse().unwrap()));
    let task = agent(
        "weft agent -v=2 --iptables-forward-rules=false --store dir:/x -public-ip 1.2.3.4 --no-nexthop-objects --resync 1m",
    );
    assert!(matches!(task.options.store, Store::Dir(path) if path == Path::new("/x")));
    assert_eq!((task.verbosity, task.notes.len(), task.options.rules.forward), (2, 0, false));
    assert_eq!(task.options.uplink.public_ip, Some([1, 2, 3, 4].into()));
    assert!(!task.options.nexthop_objects);
    assert_eq!(agent("weft agent -vmodule=a=1 -log_backtrace_at b:2").notes.len(), 2);
}

#[cfg(feature = "kube")]
#[test]
fn kubernetes_is_a_store() {
    use weft_subnet::kube::{KubeOptions, Who};
    let parse = |line: &str, env: &[(&str, &str)]| -> Result<KubeOptions, Exit> {
        let of = |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        match parse_from(line.split(' ').map(OsString::from), of)? {
            Task::LeaseList(Store::Kube(options)) => Ok(*options),
            Task::Agent(task) => match task.options.store {
                Store::Kube(options) => Ok(*options),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    };
    let options = parse("flanneld -kube-subnet-mgr", &[("NODE_NAME", "n1"), ("POD_NAME", "p")]).unwrap();
    assert!(matches!(&options.who, Who::Node(name) if name == "n1"));
    assert_eq!((options.prefix.as_str(), options.set_condition), ("flannel.alpha.coreos.com", true));
    assert_eq!(options.net_config, Path::new("/etc/kube-flannel/net-conf.json"));
    assert!(options.access.url.is_none() && options.access.kubeconfig.is_none());
    let options = parse("weft agent --kube-subnet-mgr", &[("POD_NAME", "p"), ("POD_NAMESPACE", "ns")]).unwrap();
    assert!(matches!(&options.who, Who::Pod { name, namespace } if name == "p" && namespace == "ns"));
    let line = "weft lease ls --kubeconfig-file /k --kube-api-url https://a:1 --kube-annotation-prefix a.b/";
    let options = parse(line, &[("FLANNELD_KUBE_SUBNET_MGR", "true"), ("POD_NAME", "p")]).unwrap();
    assert!(matches!(options.who, Who::Unknown), "a lease can be looked at from anywhere");
    assert_eq!((options.access.url.as_deref(), options.prefix.as_str()), (Some("https://a:1"), "a.b/"));
    assert_eq!(options.access.kubeconfig.as_deref(), Some(Path::new("/k")));
    let exit = parse("weft agent --store dir:/x", &[("FLANNELD_KUBE_SUBNET_MGR", "true")]).unwrap_err();
    assert!(exit.text.contains("are two stores") && exit.text.contains("FLANNELD_KUBE_SUBNET_MGR"), "{}", exit.text);
    agent("weft agent --kubeconfig-file /x --net-config-path /y");
}

#[test]
fn a_margin_out_of_range_is_exit_code_1_as_in_flannel() {
    for margin in ["0", "1440", "-5"] {
        let exit = refusal(&format!("weft agent --subnet-lease-renew-margin {margin}"));
        assert_eq!(exit.code, FAILURE);
        assert!(exit.text.contains("subnet-lease-renew-margin option, out of acceptable range"), "{}", exit.text);
    }
    assert_eq!(refusal("weft agent --subnet-lease-renew-margin x").code, USAGE);
    agent("weft agent --subnet-lease-renew-margin 1439");
}

#[test]
fn bad_values_name_their_flag() {
    let table = [
        ("--public-ip fd00::1", "--public-ip"),
        ("--iface-can-reach x", "--iface-can-reach"),
        ("--store zk", "--store"),
        ("--store dir:", "--store"),
        ("--etcd-endpoints ,", "--etcd-endpoints"),
        ("--etcd-keyfile k", "--etcd-certfile"),
        ("--iface-regex (", "--iface-regex"),
        // flannel's Go knows the classes of Unicode (docs/compat.md).
        ("--iface-regex ^\\p{L}", "Unicode character classes are not supported"),
        ("--resync 10x", "--resync"),
        ("--resync 0", "--resync"),
        ("--healthz-port 99999", "--healthz-port"),
        ("--healthz-port 1 --healthz-ip x", "--healthz-ip"),
        ("--on-lost-lease panic", "--on-lost-lease"),
        ("-nonsense", "--nonsense"),
        ("--ip-masq=maybe", "--ip-masq"),
        ("--iptables-resync 0", "--iptables-resync"),
        ("--firewall ufw", "--firewall"),
    ];
    for (flags, name) in table {
        let exit = refusal(&format!("weft agent {flags}"));
        assert!(exit.text.contains(name), "{flags}: {}", exit.text);
        assert_eq!(exit.code, USAGE, "{flags}");
    }
}

#[test]
fn the_environment_is_read_and_named_in_errors() {
    let env = |value: &'static str| move |name: &str| (name == "FLANNELD_RESYNC").then(|| value.to_owned());
    let words = || ["weft", "agent"].map(OsString::from);
    let Ok(Task::Agent(task)) = parse_from(words(), env("30s")) else { panic!("refused") };
    assert_eq!(task.options.resync, Duration::from_secs(30));
    let exit = parse_from(words(), env("soon")).expect_err("soon is no duration");
    assert!(exit.text.contains("FLANNELD_RESYNC"), "{}", exit.text);
    let masq = |name: &str| (name == "FLANNELD_IP_MASQ").then(|| "true".to_owned());
    let Ok(Task::Agent(task)) = parse_from(words(), masq) else { panic!("refused") };
    assert!(task.options.rules.masquerade.is_some());
}

#[test]
fn the_help_says_about_variables_what_the_page_says() {
    let page = std::fs::read_to_string("docs/configuration.md").unwrap().replace('`', "");
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&page).contains(&words(ENVIRONMENT)));
    assert!(reads_environment("weft lease ls") && !reads_environment("weft doctor pods"));
    let variable = |name: &str| (name == "FLANNELD_OUTPUT").then(|| "json".to_owned());
    let json = |command: &str| match parse_from(["weft", command].map(OsString::from), variable) {
        Ok(Task::Status(task)) => task.json,
        Ok(Task::Doctor(task)) => task.json,
        other => panic!("{other:?}"),
    };
    assert_eq!(["status", "doctor"].map(json), ["weft status", "weft doctor"].map(reads_environment));
}

/// It lets `weft cleanup` remove what another program made, so a person must have typed it.
#[test]
fn no_variable_of_the_environment_takes_the_devices_of_flannel() {
    let cleanup = |variable: &'static str| {
        parse_from(["weft", "cleanup"].map(OsString::from), |name| (name == variable).then(|| "true".to_owned()))
    };
    let taken = |variable| matches!(cleanup(variable), Ok(Task::Cleanup(CleanupTask { flannel_devices: false, .. })));
    assert!(taken("FLANNELD_FLANNEL_DEVICES"));
    let Ok(Task::Cleanup(task)) = cleanup("FLANNELD_STATE_DIR") else { panic!("another variable is read") };
    assert_eq!(task.state_dir, PathBuf::from("true"));
}

/// A command inside the agent's container has the agent's variables. `weft explain` has another flag --probe, which has no value.
#[test]
fn a_variable_sets_no_flag_without_a_value() {
    let with_variables = |line: &str| {
        let env = |name: &str| match name {
            "FLANNELD_PROBE" => Some("off".to_owned()),
            "FLANNELD_ALL" | "FLANNELD_FOLLOW" => Some("true".to_owned()),
            _ => None,
        };
        parse_from(line.split(' ').map(OsString::from), env)
    };
    assert!(matches!(with_variables("weft agent"), Ok(Task::Agent(task)) if !task.options.probe));
    assert!(matches!(with_variables("weft explain 10.5.1.2 10.5.2.3"), Ok(Task::Explain(task)) if !task.probe));
    assert!(matches!(with_variables("weft explain -probe 10.5.1.2 10.5.2.3"), Ok(Task::Explain(task)) if task.probe));
    assert!(matches!(with_variables("weft mesh"), Ok(Task::Mesh(task)) if !task.all));
    assert!(matches!(with_variables("weft history"), Ok(Task::History(task)) if !task.follow));
}

/// A variable that is meant for the agent must not end the examination of a node, and none may remove what pods left behind.
#[test]
fn doctor_reads_only_the_flags_of_the_store_from_the_environment_and_only_with_check_store() {
    let doctor = |line: &str, set: &[(&str, &str)]| {
        let env = |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        parse_from(line.split(' ').map(OsString::from), env)
    };
    let set = [
        ("FLANNELD_STORE", "dir:/x"),
        ("FLANNELD_STATE_DIR", "/state"),
        ("FLANNELD_PORT", "1"),
        ("FLANNELD_ONLY", "nonsense"),
        ("FLANNELD_CHECK_STORE", "true"),
        ("FLANNELD_FIX", "true"),
    ];
    let rows = [
        ("weft doctor", None),
        ("weft doctor --check-store", Some("/x")),
        ("weft doctor --store dir:/y --check-store", Some("/y")),
    ];
    for (line, wanted) in rows {
        let Ok(Task::Doctor(task)) = doctor(line, &set) else { panic!("{line}") };
        let Some(Store::Dir(path)) = &task.store else {
            assert!(task.store.is_none() && wanted.is_none(), "{line}");
            continue;
        };
        assert_eq!(path.to_str(), wanted, "{line}");
        assert_eq!((task.state_dir.to_str(), task.port, task.only.len()), (Some("/var/lib/weft"), 8472, 0), "{line}");
    }
    assert!(matches!(doctor("weft doctor pods", &set), Ok(Task::DoctorPods(_, false))));
    assert!(matches!(doctor("weft doctor list", &set), Ok(Task::DoctorList)));
    let wrong = [("FLANNELD_ETCD_LEASE_TTL", "soon")];
    let exit = doctor("weft doctor --check-store", &wrong).expect_err("soon is no duration");
    assert!(exit.text.contains("FLANNELD_ETCD_LEASE_TTL"), "{}", exit.text);
    assert!(matches!(doctor("weft doctor", &wrong), Ok(Task::Doctor(_))), "the store is not asked");
}

#[test]
fn other_commands() {
    assert!(matches!(run("weft status -o json --socket /x"), Ok(Task::Status(StatusTask { json: true, .. }))));
    assert!(
        matches!(run("weft lease rm 10.5.1.0-24 --store dir:/x"), Ok(Task::LeaseRemove(Store::Dir(_), id)) if id == "10.5.1.0-24")
    );
    assert!(matches!(run("weft lease ls"), Ok(Task::LeaseList(Store::Etcd(_)))));
    assert!(matches!(
        run("weft cleanup --flannel-devices"),
        Ok(Task::Cleanup(CleanupTask { flannel_devices: true, .. }))
    ));
    assert!(matches!(run("weft release --public-ip 1.2.3.4"), Ok(Task::Release(task)) if task.public.len() == 1));
    for (line, form) in [
        ("weft version", VersionForm::Text),
        ("weft version --json", VersionForm::Json),
        ("weft --version", VersionForm::Stderr),
        ("flanneld --version", VersionForm::Stderr),
    ] {
        assert!(matches!(run(line), Ok(Task::Version(asked)) if asked == form), "{line}");
    }
    assert!(run("weft --help").expect_err("help").help);
    let nothing = parse_from(std::iter::empty(), |_| None).expect_err("no command");
    assert_eq!(nothing.code, USAGE, "a program may be started without even its own name");
    assert_eq!(refusal("weft dance").code, USAGE);
}

#[test]
fn the_socket_follows_from_the_subnet_file_unless_it_is_given() {
    let rows = [
        ("", "/run/flannel/weft.sock"),
        ("--subnet-file /run/flannel/second.env", "/run/flannel/weft-second.env.sock"),
        ("--subnet-file /run/other/subnet.env", "/run/other/weft.sock"),
        ("--subnet-file /run/flannel/second.env --socket /x", "/x"),
    ];
    for (flags, wanted) in rows {
        for command in ["agent", "status", "cleanup", "release"] {
            let socket = match run(format!("weft {command} {flags}").trim_end()).unwrap() {
                Task::Agent(task) => task.options.socket,
                Task::Status(task) => task.socket,
                Task::Cleanup(task) => task.socket,
                Task::Release(task) => task.socket,
                other => panic!("{other:?}"),
            };
            assert_eq!(socket, PathBuf::from(wanted), "{command} {flags}");
        }
    }
}

#[test]
fn the_programs_of_flannels_images_are_commands() {
    for line in ["cp -f /flannel /opt/cni/bin/flannel", "/bin/cp /flannel /opt/cni/bin/flannel"] {
        let Ok(Task::Copy(files)) = run(line) else { panic!("{line}") };
        assert_eq!((files.from, files.to), ("/flannel".into(), "/opt/cni/bin/flannel".into()), "{line}");
    }
    for line in ["/opt/bin/install-conf a b", "weft install-conf a b"] {
        assert!(matches!(run(line), Ok(Task::Copy(_))), "{line}");
    }
    assert_eq!(refusal("/opt/bin/install-conf a").code, USAGE);
    assert!(matches!(run("/opt/bin/flanneld --ip-masq"), Ok(Task::Agent(_))));
}

#[test]
fn the_flags_of_mk_docker_opts_are_those_of_the_script() {
    let options = |line: &str| match run(line) {
        Ok(Task::DockerOptions(options)) => options,
        other => panic!("{line}: {other:?}"),
    };
    let usual = options("/opt/bin/mk-docker-opts.sh");
    assert_eq!(usual.subnet_file, PathBuf::from("/run/flannel/subnet.env"));
    assert_eq!(usual.output, PathBuf::from("/run/docker_opts.env"));
    assert_eq!(
        (usual.key.as_str(), usual.individual, usual.combined, usual.without_ip_masq),
        ("DOCKER_OPTS", false, false, false)
    );
    let all = options("mk-docker-opts.sh -icm -k A -d /x -f/y -d /z");
    assert_eq!((all.key.as_str(), all.individual, all.combined, all.without_ip_masq), ("A", true, true, true));
    assert_eq!((all.subnet_file, all.output), ("/y".into(), "/z".into()), "the last flag wins, as in a shell");
    assert!(options("weft docker-opts -m").without_ip_masq);
    for (line, code) in
        [("mk-docker-opts.sh -h", FAILURE), ("mk-docker-opts.sh -z", FAILURE), ("weft docker-opts -z", USAGE)]
    {
        assert_eq!((refusal(line).code, refusal(line).help), (code, false), "{line}");
    }
    assert!(refusal("weft docker-opts -h").help);
}

#[test]
fn flannels_variable_names_the_key_of_wireguard() {
    let key = |line: &str, value: &'static str| {
        let env = move |name: &str| (name == "WIREGUARD_KEY_FILE").then(|| value.to_owned());
        match parse_from(line.split(' ').map(OsString::from), env) {
            Ok(Task::Agent(task)) => task.options.wireguard_key,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(key("weft agent", "/etc/weft/key"), PathBuf::from("/etc/weft/key"));
    assert_eq!(key("weft agent --subnet-file /run/other/subnet.env", ""), PathBuf::from("/run/other/wgkey"));
}

/// Two flags of the same type could be exchanged without a complaint of the compiler.
#[test]
fn each_flag_of_the_agent_reaches_its_own_option() {
    let options = agent(
        "weft agent --iface-can-reach 192.0.2.9 --public-ip 1.2.3.4 --public-ipv6 fd00::4 --wireguard-port 51999 \
         --hold-removals 2m --change-grace 3m --unwell-after 4m --resync 5m --on-lost-lease exit --probe off \
         --allow-extension --tx-checksum-off --manage-sysctls=false --state-dir /state --healthz-ip ::1 \
         --healthz-port 8081 --cni-conf /conf --cni-conf-dir /net.d",
    )
    .options;
    let minutes = |number: u64| Duration::from_secs(60 * number);
    assert_eq!(options.uplink.can_reach, "192.0.2.9".parse().ok());
    assert_eq!(options.uplink.public_ip, "1.2.3.4".parse().ok());
    assert_eq!(options.uplink.public_ipv6, "fd00::4".parse().ok());
    assert_eq!(options.uplink.wireguard_port, Some(51999));
    assert_eq!((options.hold_removals, options.change_grace), (minutes(2), minutes(3)));
    assert_eq!((options.unwell_after, options.resync), (minutes(4), minutes(5)));
    assert_eq!((options.on_lost_lease, options.net_conf_commands), (OnLostLease::Exit, NetConfCommands::Run));
    assert_eq!((options.probe, options.tx_checksum_off, options.manage_sysctls), (false, true, false));
    assert_eq!(options.state_dir, Some(PathBuf::from("/state")));
    assert_eq!(options.health, "[::1]:8081".parse().ok());
    assert_eq!(options.cni, Some(CniOptions { conf: "/conf".into(), dir: "/net.d".into() }));

    let options = agent("weft agent --state-dir=").options;
    assert_eq!((options.state_dir, options.cni), (None, None), "an empty directory turns saving off");
    assert_eq!((options.uplink.wireguard_port, options.net_conf_commands), (None, NetConfCommands::Refuse));
    assert!(options.probe && !options.tx_checksum_off);
    assert_eq!((options.change_grace, options.unwell_after), (minutes(1), Duration::from_secs(30)));
}

#[test]
fn each_flag_of_a_store_reaches_its_own_option() {
    let task = agent(
        "weft agent --etcd-keyfile /key --etcd-certfile /cert --etcd-cafile /ca --etcd-username me --etcd-password word \
         --etcd-lease-ttl 2h --subnet-lease-renew-margin 7 --etcd-prefix /p",
    );
    let Store::Etcd(etcd) = task.options.store else { panic!("not etcd") };
    let files = [&etcd.key_file, &etcd.cert_file, &etcd.ca_file].map(|file| file.as_deref().and_then(Path::to_str));
    assert_eq!(files, [Some("/key"), Some("/cert"), Some("/ca")]);
    assert_eq!((etcd.username.as_deref(), etcd.password.as_deref()), (Some("me"), Some("word")));
    assert_eq!((etcd.lease_ttl, etcd.renew_margin), (Duration::from_secs(7200), Duration::from_secs(420)));
    assert_eq!(etcd.prefix, "/p");
    assert!(refusal("weft agent --etcd-certfile c").text.contains("--etcd-keyfile"), "one of the two is not enough");
    assert!(refusal("weft agent --etcd-lease-ttl 999ms").text.contains("--etcd-lease-ttl"));
}

#[cfg(feature = "kube")]
#[test]
fn what_the_agent_writes_into_kubernetes_can_be_turned_off() {
    let options = |flags: &str| match agent(&format!("weft agent --kube-subnet-mgr {flags}")).options.store {
        Store::Kube(options) => *options,
        other => panic!("{other:?}"),
    };
    let usual = options("--kube-events-after 2m");
    assert_eq!((usual.set_condition, usual.events_after), (true, Some(Duration::from_secs(120))));
    let silent = options("--set-node-network-unavailable=false --kube-events off --net-config-path /n");
    assert_eq!((silent.set_condition, silent.events_after), (false, None));
    assert_eq!((silent.net_config, silent.access.kubeconfig), (PathBuf::from("/n"), None));
}

#[test]
fn each_flag_of_a_command_reaches_its_own_field() {
    let Ok(Task::Cleanup(task)) =
        run("weft cleanup --subnet-file /run/a.env --socket /s --state-dir /state --cni-conf-dir /net.d")
    else {
        panic!("cleanup")
    };
    assert_eq!((task.subnet_file, task.socket), ("/run/a.env".into(), "/s".into()));
    assert_eq!((task.state_dir, task.cni_conf_dir), ("/state".into(), "/net.d".into()));
    assert!(!task.flannel_devices && task.only.is_empty());
    let Ok(Task::Cleanup(task)) = run("weft cleanup --only=fence,guard") else { panic!("cleanup") };
    assert_eq!(task.only, [cleanup::Part::Fence, cleanup::Part::Guard]);
    let Ok(Task::Release(task)) = run("weft release --state-dir /s --public-ip 1.2.3.4 --public-ipv6 fd00::4") else {
        panic!("release")
    };
    assert_eq!(task.state_dir, PathBuf::from("/s"));
    assert_eq!(task.public, ["1.2.3.4", "fd00::4"].map(|ip| ip.parse::<std::net::IpAddr>().unwrap()));
    let Ok(Task::History(task)) = run("weft history -o json -f --since 10m") else { panic!("history") };
    assert_eq!((task.json, task.follow, task.since), (true, true, Some(Duration::from_secs(600))));
    let Ok(Task::History(task)) = run("weft history") else { panic!("history") };
    assert_eq!((task.json, task.follow, task.since), (false, false, None));
    let Ok(Task::Mesh(task)) = run("weft mesh -o svg --port 9") else { panic!("mesh") };
    assert_eq!((task.all, task.output, task.port), (true, Output::Svg, Some(9)), "a picture has all nodes");
    let Ok(Task::Mesh(task)) = run("weft mesh") else { panic!("mesh") };
    assert_eq!((task.all, task.output, task.port), (false, Output::Text, None));
    let Ok(Task::Ui(task)) = run("weft ui --port 9 --peer-port 10") else { panic!("ui") };
    assert_eq!((task.port, task.peer_port, task.listen_stdin), (9, Some(10), false));
    let Ok(Task::Ui(task)) = run("weft ui --socket /s --subnet-file /run/a.env") else { panic!("ui") };
    assert_eq!((task.socket, task.subnet_file, task.port), ("/s".into(), "/run/a.env".into(), 8471));
    assert!(matches!(run("weft status rules"), Ok(Task::Status(StatusTask { json: false, rules: true, .. }))));
    assert!(matches!(run("weft plan -o json"), Ok(Task::Plan(task)) if task.json));
    assert!(matches!(run("weft rotate-key --socket /s"), Ok(Task::RotateKey(socket)) if socket == Path::new("/s")));
}

/// A measurement is of each backend, between two nodes.
#[test]
fn a_flag_without_an_effect_on_a_measurement_is_refused() {
    for flag in
        ["--nodes 5", "--backend udp", "--ipv6", "--router", "--direct-routing", "--change-backend udp", "--keep"]
    {
        let text = refusal(&format!("weft lab --measure {flag}")).text;
        assert!(text.contains("cannot be used with"), "{flag}: {text}");
    }
    assert!(matches!(run("weft lab --measure --pods cni --store dir"), Ok(Task::Lab(args)) if args.measure));
}
