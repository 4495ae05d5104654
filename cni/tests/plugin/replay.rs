// SPDX-License-Identifier: Apache-2.0
//! Records survive failing delegates and repeated calls, and records of flannel's plugin are used too.

use std::fs;
use std::io::{BufRead, BufReader, Write};

use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, umount2};
use serde_json::{Value, json};

use crate::site::{Site, on_a_node, run, wait_for};

/// A plugin that fails while the file `fail-VERB` exists. It logs its calls in the file `calls`.
const FAILING_PLUGIN: &str = r#"
cat >"$here/input"
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME" >>"$here/calls"
echo "said to the log" >&2
if [ -e "$here/fail-$CNI_COMMAND" ]; then
    cat "$here/fail-$CNI_COMMAND"
    exit 7
fi
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.0.0"}'
"#;

fn with_failing_plugin() -> impl Fn(Site, fn(&Site, &Value)) {
    |site, test| {
        site.script("failing", FAILING_PLUGIN);
        site.pod("p1");
        let conf = site.conf(json!({"delegate": {"type": "failing"}}));
        test(&site, &conf);
    }
}

fn calls(site: &Site) -> Vec<String> {
    let text = fs::read_to_string(site.path("calls")).unwrap_or_default();
    let _ = fs::remove_file(site.path("calls"));
    text.lines().map(str::to_owned).collect()
}

#[test]
fn a_failed_add_is_rolled_back_and_the_delegates_error_is_unchanged() {
    on_a_node(|site| {
        with_failing_plugin()(site, |site, conf| {
            let error = r#"{"cniVersion":"1.0.0","code":117,"msg":"no bridge","details":"at all"}"#;
            fs::write(site.path("fail-ADD"), error).unwrap();
            let answer = site.call("ADD", "p1", conf);
            assert_eq!(answer.error(), (117, "no bridge at all".to_owned()));
            assert!(answer.stderr.contains("said to the log"), "{}", answer.stderr);
            assert_eq!(calls(site), ["ADD id-p1 eth0", "DEL id-p1 eth0"]);
            assert_eq!(site.files("records"), Vec::<String>::new());
            // If the rollback fails, the record stays.
            fs::write(site.path("fail-DEL"), "").unwrap();
            assert_eq!(site.call("ADD", "p1", conf).error().0, 117);
            assert_eq!(site.files("records"), ["id-p1"]);
            fs::remove_file(site.path("fail-DEL")).unwrap();
            site.call("DEL", "p1", conf).success();
            assert_eq!(site.files("records"), Vec::<String>::new());
        });
    });
}

/// The runtime may have given other values to ADD, and expects those of the CHECK.
#[test]
fn check_hands_on_what_the_runtime_says_now() {
    on_a_node(|site| {
        with_failing_plugin()(site, |site, conf| {
            site.call("ADD", "p1", conf).success();
            let mut check = conf.clone();
            let now =
                [("prevResult", json!({"ips": [], "mark": 1})), ("runtimeConfig", json!({"mac": "02:00:00:00:00:01"}))];
            for (key, value) in &now {
                check[key] = value.clone();
            }
            check["cniVersion"] = json!("0.4.0");
            site.call("CHECK", "p1", &check).success();
            let input: Value = serde_json::from_slice(&fs::read(site.path("input")).unwrap()).unwrap();
            for (key, value) in &now {
                assert_eq!(&input[key], value, "{input}");
            }
            assert_eq!(input["cniVersion"], "0.4.0");
            // After a boot, the agent may not have written its file yet.
            fs::remove_file(site.path("run/subnet.env")).unwrap();
            site.call("CHECK", "p1", &check).success();
            site.call("DEL", "p1", conf).success();
        });
    });
}

#[test]
fn a_failed_second_add_does_not_disconnect_the_pod() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        let result = site.call("ADD", "p1", &conf).success().json();
        let answer = site.call("ADD", "p1", &conf);
        let (code, text) = answer.error();
        assert!(code == 999 && text.contains("already exists"), "{code} {text}");
        assert!(answer.stderr.contains("existed before this ADD, so nothing is rolled back"), "{}", answer.stderr);
        site.call("CHECK", "p1", &site.conf(json!({"prevResult": result}))).success();
        site.call("DEL", "p1", &conf).success();
        site.nothing_left();
    });
}

#[test]
fn del_with_the_hosts_namespace_does_not_delete_the_hosts_interface() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        site.call("ADD", "p1", &conf).success();
        site.ip("netns del p1");
        site.ip("link add eth0 type bridge");
        let mut command = site.command("DEL", "p1", "eth0");
        command.env("CNI_NETNS", "/proc/self/ns/net");
        let answer = run(command, &conf).success();
        assert!(answer.stderr.contains("is the plugin's own: the pod's namespace is gone"), "{}", answer.stderr);
        site.ip("link show eth0");
        site.nothing_left();
    });
}

/// An unmount leaves an empty file at the path of the namespace, and the bridge plugin refuses that.
#[test]
fn a_pod_whose_namespace_was_unmounted_can_be_removed() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        let gc = site.conf(json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": []}));
        for (verb, pod, conf_of_call) in [("DEL", "p1", &conf), ("GC", "", &gc)] {
            let netns = site.pod("p1");
            site.call("ADD", "p1", &conf).success();
            umount2(netns.as_str(), MntFlags::MNT_DETACH).unwrap();
            assert!(fs::metadata(&netns).unwrap().is_file(), "{verb}");
            site.call(verb, pod, conf_of_call).success();
            site.nothing_left();
            fs::remove_file(netns).unwrap();
        }
    });
}

#[test]
fn the_record_stays_until_the_delegates_del_succeeds() {
    on_a_node(|site| {
        with_failing_plugin()(site, |site, conf| {
            site.call("ADD", "p1", conf).success();
            fs::write(site.path("fail-DEL"), "not json").unwrap();
            for _ in 0..2 {
                let (code, text) = site.call("DEL", "p1", conf).error();
                let wanted = "failing DEL failed: exit code 7 not json; said to the log";
                assert_eq!((code, text.as_str()), (999, wanted));
                assert_eq!(site.files("records"), ["id-p1"], "the record must stay after a failed DEL");
            }
            // A missing plugin is a failure too.
            fs::rename(site.path("bin/failing"), site.path("away")).unwrap();
            let (_, text) = site.call("DEL", "p1", conf).error();
            assert!(text.contains("failed to find plugin \"failing\""), "{text}");
            fs::rename(site.path("away"), site.path("bin/failing")).unwrap();
            fs::remove_file(site.path("fail-DEL")).unwrap();
            // DEL must also work with an invalid configuration and without the pod's namespace.
            site.ip("netns del p1");
            let mut broken = conf.clone();
            broken["delegate"] = json!("nonsense");
            site.call("DEL", "p1", &broken).success();
            assert_eq!(site.files("records"), Vec::<String>::new());
            assert!(site.call("DEL", "p1", conf).success().stdout.is_empty(), "DEL without a record must succeed");
        });
    });
}

#[test]
fn interfaces_of_one_container_have_separate_records() {
    on_a_node(|site| {
        with_failing_plugin()(site, |site, conf| {
            for ifname in ["eth0", "net1", "net2"] {
                run(site.command("ADD", "p1", ifname), conf).success();
            }
            assert_eq!(site.files("records"), ["id-p1", "id-p1:net1", "id-p1:net2"]);
            calls(site);
            for _ in 0..2 {
                run(site.command("DEL", "p1", "net1"), conf).success();
            }
            assert_eq!(calls(site), ["DEL id-p1 net1"], "DEL must reach the delegate once, for this interface only");
            assert_eq!(site.files("records"), ["id-p1", "id-p1:net2"]);
        });
    });
}

#[test]
fn del_uses_and_removes_records_of_flannels_plugin() {
    on_a_node(|site| {
        with_failing_plugin()(site, |site, conf| {
            fs::create_dir(site.path("records")).unwrap();
            let theirs = json!({"cniVersion": "0.3.1", "name": "cbr0", "type": "failing", "mark": "flannel's"});
            let put = || fs::write(site.path("records/id-p1"), theirs.to_string()).unwrap();
            for ifname in ["eth0", "net1"] {
                put();
                run(site.command("DEL", "p1", ifname), conf).success();
                assert_eq!(calls(site), [format!("DEL id-p1 {ifname}")]);
                let input: Value = serde_json::from_slice(&fs::read(site.path("input")).unwrap()).unwrap();
                assert_eq!(input, theirs);
                assert_eq!(site.files("records"), Vec::<String>::new());
            }
            // A record that is not valid JSON is logged and kept, and DEL succeeds.
            fs::write(site.path("records/id-p1"), "{torn").unwrap();
            let answer = site.call("DEL", "p1", conf).success();
            assert!(answer.stderr.contains("is not valid JSON"), "{}", answer.stderr);
            assert_eq!((site.files("records"), calls(site)), (vec!["id-p1".to_owned()], vec![]));
        });
    });
}

/// An installer may be copying a newer version over it, and the kernel starts no program that is open for writing.
#[test]
fn a_delegate_that_is_being_written_is_waited_for() {
    on_a_node(|site| {
        with_failing_plugin()(site, |site, conf| {
            let written = fs::OpenOptions::new().append(true).open(site.path("bin/failing")).unwrap();
            let mut child = site.command("ADD", "p1", "eth0").spawn().unwrap();
            child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
            let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
            let waits = log.by_ref().map(Result::unwrap).any(|line| line.starts_with("waiting until "));
            assert!(waits, "ADD must not fail while somebody writes the delegate");
            drop(written);
            assert!(child.wait().unwrap().success());
            assert_eq!(calls(site), ["ADD id-p1 eth0"]);
            site.call("DEL", "p1", conf).success();
        });
    });
}

/// A plugin that waits for the file `go-on`, but not for ever.
const WAITING_PLUGIN: &str = r#"
cat >/dev/null
touch "$here/began-$CNI_COMMAND"
tries=1200
while [ ! -e "$here/go-on" ] && [ $tries -gt 0 ]; do
    sleep 0.05
    tries=$((tries - 1))
done
[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion":"1.0.0"}'
"#;

/// While the delegate runs, no other call for this pod may begin, even if the runtime has killed the plugin.
#[test]
fn the_lock_is_held_until_the_delegate_of_a_killed_call_ends() {
    on_a_node(|site| {
        site.script("waiting", WAITING_PLUGIN);
        site.pod("p1");
        let conf = site.conf(json!({"delegate": {"type": "waiting"}}));
        for verb in ["ADD", "DEL"] {
            let _ = fs::remove_file(site.path("go-on"));
            let mut child = site.command(verb, "p1", "eth0").spawn().unwrap();
            child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
            wait_for("the delegate", || site.path(&format!("began-{verb}")).exists());
            child.kill().unwrap();
            child.wait().unwrap();
            let record = || fs::File::open(site.path("records/id-p1")).unwrap();
            let is_free = || Flock::lock(record(), FlockArg::LockExclusiveNonblock).is_ok();
            assert!(!is_free(), "{verb}: its delegate is running");
            fs::write(site.path("go-on"), "").unwrap();
            wait_for("the end of the delegate", is_free);
        }
        site.call("DEL", "p1", &conf).success();
        assert_eq!(site.files("records"), Vec::<String>::new());
    });
}
