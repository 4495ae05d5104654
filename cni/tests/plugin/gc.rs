// SPDX-License-Identifier: Apache-2.0
//! GC removes everything that belongs to attachments which are not in the runtime's list, and nothing else.

use std::fs;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::site::{Site, nat_rules, on_a_node, run, wait_for};

fn gc(site: &Site, valid: Value) -> Value {
    site.conf(json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid}))
}

fn rules() -> String {
    nat_rules("iptables")
}

#[test]
fn gc_removes_everything_of_attachments_that_are_not_valid() {
    on_a_node(|site| {
        // The delegate masquerades, so there are rules that can leak.
        let masq = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n";
        site.subnet_env(masq);
        let conf = site.conf(json!({}));
        for pod in ["lives", "died", "netnsgone"] {
            site.pod(pod);
            site.call("ADD", pod, &conf).success();
            assert!(rules().contains(&format!("id-{pod}")), "{}", rules());
        }
        site.ip("netns del netnsgone");
        // Reservations without a record: of a container that is gone, of old versions of host-local, and of a
        // host-local that was killed.
        for (addr, text) in [("10.5.1.50", "nobody\r\neth0"), ("10.5.1.51", "id-lives\r\nnet9"), ("10.5.1.52", "")] {
            fs::write(site.path("networks/cbr0").join(addr), text).unwrap();
        }
        fs::write(site.path("networks/cbr0/10.5.1.53"), "id-lives").unwrap();
        // An ADD that was killed long ago had not yet given its record the name.
        let torn = fs::File::create(site.path("records/.id-torn~1")).unwrap();
        torn.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
        drop(torn);
        let answer = site.call("GC", "", &gc(&site, json!([{"containerID": "id-lives", "ifname": "eth0"}]))).success();
        assert!(answer.stdout.is_empty(), "{answer:?}");
        assert_eq!(site.files("records"), ["id-lives"]);
        // id-lives has a record, so its additional reservations are left to the delegate.
        assert_eq!(site.addresses(), ["10.5.1.2", "10.5.1.51", "10.5.1.53"]);
        wait_for("the veths of the removed pods to disappear", || site.veths() == 1);
        assert!(
            rules().contains("id-lives") && !rules().contains("died") && !rules().contains("netnsgone"),
            "{}",
            rules()
        );
        assert_eq!(rules().matches("-N CNI-").count(), 1, "{}", rules());
        // A missing list is an error and nothing is removed. A list that is null, as Go encodes an empty one, is an
        // empty list.
        let mut without = gc(&site, json!([]));
        without.as_object_mut().unwrap().remove("cni.dev/valid-attachments");
        assert_eq!(site.call("GC", "", &without).error().0, 7);
        assert_eq!(site.files("records"), ["id-lives"]);
        site.call("GC", "", &gc(&site, Value::Null)).success();
        site.nothing_left();
        assert_eq!(rules().matches("CNI-").count(), 0, "{}", rules());
    });
}

#[test]
fn gc_keeps_records_of_other_networks_and_handles_records_of_flannels_plugin() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        for pod in ["theirs", "ours", "other"] {
            site.pod(pod);
        }
        site.call("ADD", "theirs", &conf).success();
        site.call("ADD", "ours", &conf).success();
        let mut other = conf.clone();
        other["name"] = json!("other");
        other["delegate"] = json!({"bridge": "cni1"});
        other["subnetFile"] = json!(site.path("other.env"));
        fs::write(site.path("other.env"), crate::site::env_text("10.5.9", "fd05:0:0:9", 1450)).unwrap();
        run(site.command("ADD", "other", "net1"), &other).success();
        // flannel's plugin does not record the interface. Only host-local's reservation names it.
        let file = site.path("records/id-theirs");
        let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        record.as_object_mut().unwrap().remove("weft");
        fs::write(&file, record.to_string()).unwrap();
        site.call("GC", "", &gc(&site, json!([{"containerID": "id-theirs", "ifname": "eth0"}]))).success();
        assert_eq!(
            site.files("records"),
            ["id-other:net1", "id-theirs"],
            "GC must keep the record of a valid attachment that flannel's plugin wrote"
        );
        site.call("GC", "", &gc(&site, json!([]))).success();
        assert_eq!(site.files("records"), ["id-other:net1"], "GC must keep records of other networks");
        assert_eq!(site.files("networks/other").len(), 2);
        assert!(site.addresses().is_empty());
        run(site.command("DEL", "other", "net1"), &other).success();
        site.ip("netns del theirs");
        site.nothing_left();
    });
}

#[test]
fn gc_continues_after_a_failure_and_calls_the_delegates_gc() {
    on_a_node(|site| {
        let script = r#"
            cat >"$here/input-$CNI_COMMAND"
            case $CNI_COMMAND in
            ADD) echo '{"cniVersion":"1.1.0"}' ;;
            VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}' ;;
            DEL) [ "$CNI_CONTAINERID" != id-p1 ] || { echo '{"code":5,"msg":"the disk is full"}'; exit 1; } ;;
            esac"#;
        site.script("new", script);
        let with = |conf: Value| {
            let mut conf = conf;
            (conf["cniVersion"], conf["delegate"]) = (json!("1.1.0"), json!({"type": "new"}));
            conf
        };
        for pod in ["p1", "p2", "p3"] {
            site.pod(pod);
            site.call("ADD", pod, &with(site.conf(json!({})))).success();
        }
        let valid = json!([{"containerID": "id-p3", "ifname": "eth0"}]);
        let (_, text) = site.call("GC", "", &with(gc(&site, valid.clone()))).error();
        assert!(text.contains("records/id-p1: the disk is full (code 5)"), "{text}");
        assert_eq!(site.files("records"), ["id-p1", "id-p3"]);
        let input: Value = serde_json::from_slice(&fs::read(site.path("input-GC")).unwrap()).unwrap();
        assert_eq!(input["cni.dev/valid-attachments"], valid);
        assert_eq!((&input["type"], &input["name"]), (&json!("new"), &json!("cbr0")));
    });
}

/// A plugin that logs its calls in the file `calls`, each with the network namespace and the arguments that it was given.
const LOGGING_PLUGIN: &str = r#"
cat >/dev/null
case $CNI_COMMAND in
ADD) echo '{"cniVersion":"1.0.0"}' ;;
DEL) echo "$CNI_CONTAINERID $CNI_IFNAME [$CNI_NETNS] [$CNI_ARGS]" >>"$here/calls" ;;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}' ;;
esac"#;

/// Adds pods with this plugin, and changes the record of each.
fn add_logged(site: &Site, pods: &[&str], change: impl Fn(&str, &mut Value)) {
    site.script("logging", LOGGING_PLUGIN);
    for pod in pods {
        site.pod(pod);
        site.call("ADD", pod, &site.conf(json!({"delegate": {"type": "logging"}}))).success();
        let file = site.path(&format!("records/id-{pod}"));
        let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        change(pod, &mut record);
        fs::write(&file, record.to_string()).unwrap();
    }
}

/// Collects everything, and returns the DELs that the plugin got.
fn dels_of_gc(site: &Site) -> Vec<String> {
    let mut conf = gc(site, json!([]));
    conf["delegate"] = json!({"type": "logging"});
    site.call("GC", "", &conf).success();
    assert_eq!(site.files("records"), Vec::<String>::new());
    fs::read_to_string(site.path("calls")).unwrap().lines().map(str::to_owned).collect()
}

/// The number of the process in a path below /proc may be that of another process by now, even of one in the host's namespace. Some plugins
/// fail if they get the path of a namespace that is gone.
#[test]
fn gc_names_only_a_namespace_that_is_there_and_has_a_name() {
    on_a_node(|site| {
        add_logged(&site, &["gone", "named", "numbered"], |pod, record| match pod {
            "numbered" => record["weft"]["netns"] = json!(format!("/proc/{}/ns/net", std::process::id())),
            _ => record["weft"]["args"] = json!("K8S_POD_NAME=x"),
        });
        site.ip("netns del gone");
        let wanted = [
            "id-gone eth0 [] [K8S_POD_NAME=x]",
            "id-named eth0 [/run/netns/named] [K8S_POD_NAME=x]",
            "id-numbered eth0 [] []",
        ];
        assert_eq!(dels_of_gc(&site), wanted);
    });
}

#[test]
fn gc_removes_every_interface_of_a_record_of_flannels_plugin() {
    on_a_node(|site| {
        add_logged(&site, &["p1", "p2"], |_, record| drop(record.as_object_mut().unwrap().remove("weft")));
        fs::create_dir_all(site.path("networks/cbr0")).unwrap();
        for (addr, text) in
            [("10.5.1.8", "id-p1\r\neth0"), ("10.5.1.9", "id-p1\r\nnet1"), ("10.5.1.7", "other\r\nnet2")]
        {
            fs::write(site.path("networks/cbr0").join(addr), text).unwrap();
        }
        // No reservation names the interface of p2. And the agent may not have written its file yet.
        fs::remove_file(site.path("run/subnet.env")).unwrap();
        assert_eq!(dels_of_gc(&site), ["id-p1 eth0 [] []", "id-p1 net1 [] []", "id-p2 eth0 [] []"]);
    });
}

#[test]
fn gc_fails_if_rules_cannot_be_listed() {
    on_a_node(|mut site| {
        site.vars.push(("PATH".to_owned(), format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", site.path("bin").display())));
        let fails = |text: &str| format!("echo '{text}' >&2; exit 4");
        site.script("iptables", &fails("Another app is currently holding the xtables lock."));
        let (_, text) = site.call("GC", "", &gc(&site, json!([]))).error();
        assert!(text.contains("iptables -w -t nat -S") && text.contains("xtables lock"), "{text}");
        // The rules of both families are looked at.
        site.script("ip6tables", &fails("Fatal: no lock file /run/xtables.lock: Permission denied"));
        let (_, text) = site.call("GC", "", &gc(&site, json!([]))).error();
        assert!(text.contains("iptables -w -t nat -S") && text.contains("xtables lock"), "{text}");
        assert!(text.contains("ip6tables -w -t nat -S") && text.contains("Permission denied"), "{text}");
        // What nft says about a chain that is not there, iptables says about its lock.
        site.script("ip6tables", &fails("Fatal: can not open lock file /run/xtables.lock: No such file or directory"));
        let (_, text) = site.call("GC", "", &gc(&site, json!([]))).error();
        assert!(text.contains("ip6tables -w -t nat -S") && text.contains("No such file"), "{text}");
        // If the kernel does not have the table, there are no rules in it.
        let none = "can not initialize iptables table nat: Table does not exist (do you need to insmod?)";
        site.script("iptables", &fails(none));
        site.script("ip6tables", &fails(none));
        site.call("GC", "", &gc(&site, json!([]))).success();
        site.script("nft", &fails("Error: Operation not permitted"));
        let (_, text) = site.call("GC", "", &gc(&site, json!([]))).error();
        assert!(text.contains("nft -j -a list chain") && text.contains("not permitted"), "{text}");
    });
}
