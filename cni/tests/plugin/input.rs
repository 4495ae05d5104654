// SPDX-License-Identifier: Apache-2.0
//! What the delegate is given, row by row of flannel-compat.md section 12; with flannel's own plugin (the file that `FLANNEL_CNI`
//! names) beside it where there is one.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::{Value, json};

use crate::site::{Site, on_a_node};

const RECORDER: &str = r#"
cat >"$here/input"
env | grep ^CNI_ | grep -v ^CNI_PATH | sort >"$here/env"
echo '{"cniVersion":"0.3.1","ips":[],"kept":"as it is"}'
"#;

const V4: &str = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
const V6: &str =
    "FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n";
const MANY: &str = "FLANNEL_NETWORK=10.5.0.0/16,10.6.0.0/16,10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\n\
    FLANNEL_IPV6_NETWORK=fd05::/48,fd06::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\nFLANNEL_MTU=8950\nFLANNEL_IPMASQ=true\n";

/// What the row's configuration has, subnet.env, and what the delegate must be given.
fn rows() -> Vec<(&'static str, Value, &'static str, Value)> {
    let ipam =
        json!({"type": "host-local", "ranges": [[{"subnet": "10.5.1.0/24"}]], "routes": [{"dst": "10.5.0.0/16"}]});
    let bridge = json!({
        "cniVersion": "0.3.1", "name": "cbr0", "type": "bridge", "isGateway": true, "ipMasq": false, "mtu": 1450, "ipam": ipam,
    });
    let with = |more: Value, less: &[&str]| {
        let mut all = bridge.clone();
        for (key, value) in more.as_object().unwrap() {
            all[key] = value.clone();
        }
        less.iter().for_each(|key| drop(all.as_object_mut().unwrap().remove(*key)));
        all
    };
    let users_ipam = json!({"type": "other", "ranges": [[{"subnet": "1.2.3.0/24"}]], "routes": [{"dst": "0.0.0.0/0", "gw": "10.5.1.9"}], "x": 1});
    let filled_ipam = json!({
        "type": "other", "ranges": [[{"subnet": "10.5.1.0/24"}]], "x": 1,
        "routes": [{"dst": "0.0.0.0/0", "gw": "10.5.1.9"}, {"dst": "10.5.0.0/16"}],
    });
    let v6 =
        json!({"type": "host-local", "ranges": [[{"subnet": "fd05:0:0:1::/64"}]], "routes": [{"dst": "fd05::/48"}]});
    let many = json!({
        "type": "host-local", "ranges": [[{"subnet": "10.5.1.0/24"}], [{"subnet": "fd05:0:0:1::/64"}]],
        "routes": [{"dst": "10.5.0.0/16"}, {"dst": "10.6.0.0/16"}, {"dst": "fd05::/48"}, {"dst": "fd06::/48"}],
    });
    let capabilities =
        json!({"portMappings": [{"hostPort": 1}], "bandwidth": {"ingressRate": 1}, "ips": ["10.5.1.3/24"]});
    vec![
        ("nothing said", json!({}), V4, bridge.clone()),
        ("no cniVersion", json!({"cniVersion": null}), V4, with(json!({}), &["cniVersion"])),
        (
            "the manifest's",
            json!({"delegate": {"hairpinMode": true, "isDefaultGateway": true}}),
            V4,
            with(json!({"hairpinMode": true, "isDefaultGateway": true}), &[]),
        ),
        (
            "what is said stays",
            json!({"delegate": {"mtu": 1400, "ipMasq": true, "isGateway": false}}),
            V4,
            with(json!({"mtu": 1400, "ipMasq": true, "isGateway": false}), &[]),
        ),
        ("another delegate", json!({"delegate": {"type": "ptp"}}), V4, with(json!({"type": "ptp"}), &["isGateway"])),
        ("capabilities", json!({"runtimeConfig": capabilities}), V4, with(json!({"runtimeConfig": capabilities}), &[])),
        ("the user's ipam", json!({"ipam": users_ipam}), V4, with(json!({"ipam": filled_ipam}), &[])),
        ("no prevResult", json!({"prevResult": {"cniVersion": "0.3.1", "ips": []}}), V4, bridge.clone()),
        ("IPv6, the delegate masquerades", json!({}), V6, with(json!({"ipMasq": true, "mtu": 1430, "ipam": v6}), &[])),
        ("both, several networks", json!({}), MANY, with(json!({"mtu": 8950, "ipam": many}), &[])),
        (
            "a key in another case",
            json!({"Delegate": {"type": "ptp"}}),
            V4,
            with(json!({"type": "ptp"}), &["isGateway"]),
        ),
    ]
}

/// The row's configuration; null takes a key away.
fn conf(site: &Site, row: &Value) -> Value {
    let mut conf = site.conf(json!({"cniVersion": "0.3.1"}));
    conf.as_object_mut().unwrap().remove("ipam");
    for (key, value) in row.as_object().unwrap() {
        conf[key] = value.clone();
    }
    conf.as_object_mut().unwrap().retain(|_, value| !value.is_null());
    conf
}

fn read(site: &Site, file: &str) -> Value {
    serde_json::from_slice(&fs::read(site.path(file)).unwrap()).unwrap()
}

/// All rows; the plugin is what `bin/flannel` is.
fn judge(site: &Site, ours: bool) {
    for name in ["bridge", "ptp"] {
        site.script(name, RECORDER);
    }
    for (title, row, env, wanted) in rows() {
        site.subnet_env(env);
        let conf = conf(site, &row);
        let added = site.call("ADD", "p1", &conf).fine();
        assert_eq!(read(site, "input"), wanted, "{title}");
        let vars = "CNI_COMMAND=ADD\nCNI_CONTAINERID=id-p1\nCNI_IFNAME=eth0\nCNI_NETNS=/run/netns/p1\n";
        assert_eq!(fs::read_to_string(site.path("env")).unwrap(), vars, "{title}");
        let mut record = read(site, "records/id-p1");
        if ours {
            assert_eq!(added.json()["kept"], "as it is", "{title}");
            assert_eq!(record["weft"], json!({"ifname": "eth0", "netns": "/run/netns/p1", "args": ""}), "{title}");
            record.as_object_mut().unwrap().remove("weft");
        }
        assert!(
            added.stderr.contains("\"mtu\":"),
            "{title}: the rendered configuration is in the log: {}",
            added.stderr
        );
        assert_eq!(record, wanted, "{title}");
        fs::remove_file(site.path("run/subnet.env")).unwrap();
        site.call("DEL", "p1", &conf).fine();
        assert_eq!(
            read(site, "input"),
            wanted,
            "{title}: DEL gets the recorded configuration, and needs no subnet.env"
        );
        assert!(fs::read_to_string(site.path("env")).unwrap().contains("CNI_COMMAND=DEL"), "{title}");
        assert_eq!(site.files("records"), Vec::<String>::new(), "{title}");
    }
}

fn install(site: &Site, plugin: &Path) {
    fs::remove_file(site.path("bin/flannel")).unwrap();
    symlink(plugin, site.path("bin/flannel")).unwrap();
}

/// What one of the two plugins wired, the other takes back.
fn take_turns(site: &Site, theirs: &Path) {
    for name in ["bridge", "ptp"] {
        fs::remove_file(site.path("bin").join(name)).unwrap();
    }
    site.subnet_env(MANY);
    let ours = Path::new(env!("CARGO_BIN_EXE_weft-cni"));
    for (adds, takes_back) in [(ours, theirs), (theirs, ours)] {
        install(site, adds);
        site.call("ADD", "p1", &site.conf(json!({}))).fine();
        install(site, takes_back);
        site.call("DEL", "p1", &site.conf(json!({}))).fine();
        site.nothing_left();
    }
}

#[test]
fn the_delegate_is_given_what_flannels_plugin_gives_it() {
    on_a_node(|site| {
        site.pod("p1");
        judge(&site, true);
        // flannel's own plugin on the same rows: the table itself is tested by it.
        match std::env::var_os("FLANNEL_CNI") {
            None => eprintln!("flannel's own plugin is not compared: no FLANNEL_CNI"),
            Some(theirs) => {
                install(&site, theirs.as_ref());
                judge(&site, false);
                take_turns(&site, theirs.as_ref());
            }
        }
    });
}

#[test]
fn records_are_for_root_alone() {
    use std::os::unix::fs::PermissionsExt;
    on_a_node(|site| {
        site.script("bridge", RECORDER);
        site.pod("p1");
        site.call("ADD", "p1", &site.conf(json!({}))).fine();
        let mode = |path: &str| fs::metadata(site.path(path)).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("records"), mode("records/id-p1")), (0o700, 0o600));
    });
}
