// SPDX-License-Identifier: Apache-2.0
//! Converts flags into [`Options`] and checks what clap cannot check. Each error names the flag and the remedy.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use weft_backends::register::TYPES;
use weft_backends::traffic_rules::Masquerade;
use weft_subnet::etcd::EtcdOptions;

use super::Exit;
use super::duration::LONGEST;
use super::exit::{FAILURE, USAGE};
use super::flags::{AgentFlags, RuleFlags, StoreFlags, Switch, UplinkFlags};
use crate::options::{CniOptions, Fences, NetConfCommands, Options, RuleOptions, Store, UplinkChoice};

/// Looks up a variable of the environment.
pub(super) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Returns the options of the agent, and lines to be logged when the log is open.
pub(super) fn agent(flags: AgentFlags, env: Env) -> Result<(Options, Vec<String>), Exit> {
    let mut notes = Vec::new();
    for (flag, value) in [("vmodule", &flags.log.vmodule), ("log_backtrace_at", &flags.log.log_backtrace_at)] {
        if !value.is_empty() {
            notes.push(format!("--{flag} has no effect in weft: use -v"));
        }
    }
    let run = flags.run;
    if run.resync < Duration::from_secs(1) {
        return Err(usage("--resync is below one second: give at least 1s, the default is 10s".to_owned()));
    }
    let health = match run.healthz_port {
        0 => None,
        port => Some(SocketAddr::new(parse::<IpAddr>("healthz-ip", &run.healthz_ip)?, port)),
    };
    let wireguard_key = env("WIREGUARD_KEY_FILE").and_then(some).map(PathBuf::from);
    let options = Options {
        wireguard_key: wireguard_key.unwrap_or_else(|| flags.place.instance.subnet_file.with_file_name("wgkey")),
        store: store(flags.store, env)?,
        uplink: uplink(flags.uplink)?,
        socket: flags.place.instance.socket(),
        subnet_file: flags.place.instance.subnet_file,
        health,
        resync: run.resync,
        nexthop_objects: !run.no_nexthop_objects,
        hold_removals: run.hold_removals,
        change_grace: run.change_grace,
        net_conf_commands: if run.allow_extension { NetConfCommands::Run } else { NetConfCommands::Refuse },
        on_lost_lease: run.on_lost_lease,
        manage_sysctls: run.manage_sysctls,
        tx_checksum_off: run.tx_checksum_off,
        state_dir: some(flags.place.state_dir).map(PathBuf::from),
        probe: run.probe == Switch::On,
        unwell_after: run.unwell_after,
        rules: rules(&flags.rules)?,
        cni: some(flags.cni.cni_conf).map(|conf| CniOptions { conf: conf.into(), dir: flags.cni.dir.cni_conf_dir }),
    };
    Ok((options, notes))
}

/// Converts `--store`, `--etcd-*` and `--kube-*`.
pub(super) fn store(flags: StoreFlags, env: Env) -> Result<Store, Exit> {
    // The text and the exit code are flannel's, because scripts depend on them.
    if !(1..=1439).contains(&flags.subnet_lease_renew_margin) {
        let text = "Invalid subnet-lease-renew-margin option, out of acceptable range: give 1 to 1439 minutes";
        return Err(Exit::new(FAILURE, text.to_owned()));
    }
    if flags.kube.kube_subnet_mgr {
        return kube(flags, env);
    }
    if let Some(path) = flags.store.strip_prefix("dir:") {
        if path.is_empty() {
            return Err(usage("--store dir: lacks its directory: write --store dir:/var/lib/weft/store".to_owned()));
        }
        return Ok(Store::Dir(PathBuf::from(path)));
    }
    if flags.store != "etcd" {
        return Err(usage(format!("--store {} is unknown: give etcd or dir:PATH", flags.store)));
    }
    let split = flags.etcd_endpoints.split(',').map(str::trim).filter(|url| !url.is_empty());
    let endpoints: Vec<String> = split.map(str::to_owned).collect();
    if endpoints.is_empty() {
        return Err(usage("--etcd-endpoints is empty: give at least one, such as http://127.0.0.1:2379".to_owned()));
    }
    if flags.etcd_keyfile.is_empty() != flags.etcd_certfile.is_empty() {
        return Err(usage("--etcd-keyfile and --etcd-certfile belong together: give both or neither".to_owned()));
    }
    if flags.etcd_lease_ttl < Duration::from_secs(1) {
        return Err(usage("--etcd-lease-ttl is below one second: the default is 24h".to_owned()));
    }
    Ok(Store::Etcd(EtcdOptions {
        endpoints,
        prefix: flags.etcd_prefix,
        key_file: some(flags.etcd_keyfile).map(PathBuf::from),
        cert_file: some(flags.etcd_certfile).map(PathBuf::from),
        ca_file: some(flags.etcd_cafile).map(PathBuf::from),
        username: some(flags.etcd_username),
        password: some(flags.etcd_password),
        lease_ttl: flags.etcd_lease_ttl,
        renew_margin: Duration::from_secs(flags.subnet_lease_renew_margin.unsigned_abs() * 60),
        types: TYPES,
    }))
}

fn uplink(flags: UplinkFlags) -> Result<UplinkChoice, Exit> {
    for regex in &flags.iface_regex {
        if let Err(error) = regex_lite::Regex::new(regex) {
            return Err(usage(format!("--iface-regex {regex} is not a regular expression: {error}")));
        }
    }
    Ok(UplinkChoice {
        ifaces: flags.iface.into_iter().filter(|name| !name.is_empty()).collect(),
        regexes: flags.iface_regex.into_iter().filter(|regex| !regex.is_empty()).collect(),
        can_reach: optional("iface-can-reach", &flags.iface_can_reach)?,
        public_ip: optional("public-ip", &flags.public_ip)?,
        public_ipv6: optional("public-ipv6", &flags.public_ipv6)?,
        wireguard_port: Some(flags.wireguard_port).filter(|port| *port != 0),
    })
}

fn rules(flags: &RuleFlags) -> Result<RuleOptions, Exit> {
    let seconds = flags.iptables_resync;
    let resync = Duration::from_secs(seconds);
    if resync.is_zero() || resync > LONGEST {
        let text = format!("--iptables-resync {seconds}: give 1 to {} seconds, the default is 5", LONGEST.as_secs());
        return Err(usage(text));
    }
    let fully_random = !flags.masq.ip_masq_fully_random_disable;
    let (fence, masquerade) = (&flags.fence, Masquerade { fully_random, ..Masquerade::default() });
    Ok(RuleOptions {
        firewall: flags.firewall,
        masquerade: flags.masq.ip_masq.then_some(masquerade),
        forward: flags.iptables_forward_rules,
        resync,
        fences: Fences { fail_closed: fence.fail_closed.unwrap_or(true), blackhole: fence.ip_blackhole_route },
        guard: fence.guard_tunnel,
    })
}

/// Converts `--kube-*` and the variables that tell a pod on which node it runs.
#[cfg(feature = "kube")]
fn kube(flags: StoreFlags, env: Env) -> Result<Store, Exit> {
    use weft_subnet::kube::{Access, KubeOptions, Proxies, Who};
    if flags.store != "etcd" {
        return Err(usage(format!("--store {} and --kube-subnet-mgr are two stores: give one", flags.store)));
    }
    let var = |name: &str| env(name).filter(|value| !value.is_empty());
    let who = match (var("NODE_NAME"), var("POD_NAME"), var("POD_NAMESPACE")) {
        (Some(name), ..) => Who::Node(name),
        (None, Some(name), Some(namespace)) => Who::Pod { name, namespace },
        _ => Who::Unknown,
    };
    let kube = flags.kube;
    let access = Access {
        url: some(kube.kube_api_url),
        kubeconfig: some(kube.kubeconfig_file).map(PathBuf::from),
        proxies: Proxies::from_environment(env),
    };
    Ok(Store::Kube(Box::new(KubeOptions {
        access,
        who,
        prefix: kube.kube_annotation_prefix,
        net_config: PathBuf::from(kube.net_config_path),
        set_condition: kube.set_node_network_unavailable,
        events_after: (kube.kube_events == Switch::On).then_some(kube.kube_events_after),
        types: TYPES,
    })))
}

#[cfg(not(feature = "kube"))]
fn kube(_: StoreFlags, _: Env) -> Result<Store, Exit> {
    Err(usage("--kube-subnet-mgr: this weft was built without Kubernetes (cargo feature kube)".to_owned()))
}

fn some(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn optional<T: FromStr>(flag: &str, text: &str) -> Result<Option<T>, Exit> {
    if text.is_empty() { Ok(None) } else { parse(flag, text).map(Some) }
}

fn parse<T: FromStr>(flag: &str, text: &str) -> Result<T, Exit> {
    text.parse().map_err(|_| usage(format!("--{flag} {text} is not an IP address of the right family")))
}

fn usage(text: String) -> Exit {
    Exit::new(USAGE, text)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::cli::{Task, parse_from};

    /// Returns what these words after `weft agent` lead to, with this environment.
    fn built(words: &[&str], env: &[(&str, &str)]) -> Result<Options, Exit> {
        let of = |name: &str| env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let words = ["weft", "agent"].iter().chain(words).map(OsString::from);
        match parse_from(words, of)? {
            Task::Agent(task) => Ok(task.options),
            other => panic!("{other:?}"),
        }
    }

    /// Charts and unit files write flags whose value is empty.
    #[test]
    fn a_flag_without_a_value_counts_as_not_given() {
        let empty = ["--iface=", "--iface=eth1", "--iface-regex=", "--iface-can-reach=", "--public-ip=", "--cni-conf="];
        let options = built(&empty, &[("WIREGUARD_KEY_FILE", "")]).unwrap();
        let UplinkChoice { ifaces, regexes, can_reach, public_ip, .. } = options.uplink;
        assert_eq!((ifaces, regexes, can_reach, public_ip), (vec!["eth1".to_owned()], Vec::new(), None, None));
        assert_eq!((options.cni, options.wireguard_key), (None, "/run/flannel/wgkey".into()));
        let endpoints = ["--etcd-endpoints", " http://a:1 ,, http://b:2,", "--etcd-username=", "--etcd-cafile="];
        let Store::Etcd(etcd) = built(&endpoints, &[]).unwrap().store else { panic!("not etcd") };
        assert_eq!(etcd.endpoints, ["http://a:1", "http://b:2"]);
        assert_eq!((etcd.username, etcd.ca_file), (None, None));
    }

    #[test]
    fn the_smallest_and_largest_values_are_accepted_and_no_others() {
        for (flag, good, bad) in [
            ("--resync", "1s", "999ms"),
            ("--etcd-lease-ttl", "1s", "999ms"),
            ("--iptables-resync", "1", "0"),
            ("--iptables-resync", "3153600000", "3153600001"),
            ("--subnet-lease-renew-margin", "1", "0"),
            ("--subnet-lease-renew-margin", "1439", "1440"),
        ] {
            assert!(built(&[flag, good], &[]).is_ok(), "{flag} {good}");
            let exit = built(&[flag, bad], &[]).unwrap_err();
            assert!(exit.text.contains(flag.trim_start_matches('-')), "{flag} {bad}: {}", exit.text);
        }
    }

    /// A manifest may set a variable that has no value on this node.
    #[cfg(feature = "kube")]
    #[test]
    fn an_empty_node_name_is_none() {
        use weft_subnet::kube::Who;
        let env = [("NODE_NAME", ""), ("POD_NAME", "p"), ("POD_NAMESPACE", "ns")];
        let Store::Kube(kube) = built(&["--kube-subnet-mgr"], &env).unwrap().store else { panic!("not Kubernetes") };
        assert!(
            matches!(&kube.who, Who::Pod { name, namespace } if name == "p" && namespace == "ns"),
            "{:?}",
            kube.who
        );
        let Store::Kube(kube) = built(&["--kube-subnet-mgr"], &env[..2]).unwrap().store else {
            panic!("not Kubernetes")
        };
        assert!(matches!(kube.who, Who::Unknown), "a pod has a namespace: {:?}", kube.who);
    }
}
