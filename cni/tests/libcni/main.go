// SPDX-License-Identifier: Apache-2.0

// Calls plugins through libcni, as a container runtime does. One process makes one call for a list of plugins and
// prints the result as JSON on standard output. CNI_PATH contains the directories of the plugins.
//
//	libcni VERB LIST CACHE [CONTAINER NETNS IFNAME] [ID/IFNAME]...
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

type answer struct {
	Result types.Result `json:"result,omitempty"`
	Known  []string     `json:"known,omitempty"`
	Code   uint         `json:"code"`
	Error  string       `json:"error,omitempty"`
}

func call(verb, file, cache string, rest []string) (answer, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return answer{}, err
	}
	list, err := libcni.NetworkConfFromBytes(text)
	if err != nil {
		return answer{}, err
	}
	ctx := context.Background()
	cni := libcni.NewCNIConfigWithCacheDir(filepath.SplitList(os.Getenv("CNI_PATH")), cache, nil)
	var pod libcni.RuntimeConf
	if verb == "ADD" || verb == "CHECK" || verb == "DEL" {
		pod = libcni.RuntimeConf{ContainerID: rest[0], NetNS: rest[1], IfName: rest[2]}
		pod.Args = [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", "a-pod"}}
		ports := []map[string]any{{"hostPort": 8088, "containerPort": 80, "protocol": "tcp"}}
		pod.CapabilityArgs = map[string]any{"portMappings": ports}
	}
	switch verb {
	case "ADD":
		result, err := cni.AddNetworkList(ctx, list, &pod)
		return answer{Result: result}, err
	case "CHECK":
		return answer{}, cni.CheckNetworkList(ctx, list, &pod)
	case "DEL":
		return answer{}, cni.DelNetworkList(ctx, list, &pod)
	case "STATUS":
		return answer{}, cni.GetStatusNetworkList(ctx, list)
	case "VALIDATE":
		known, err := cni.ValidateNetworkList(ctx, list)
		return answer{Known: known}, err
	case "VERSION":
		info, err := cni.GetVersionInfo(ctx, list.Plugins[0].Network.Type)
		if err != nil {
			return answer{}, err
		}
		return answer{Known: info.SupportedVersions()}, nil
	case "GC":
		args := libcni.GCArgs{}
		for _, name := range rest {
			id, ifname, _ := strings.Cut(name, "/")
			args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: id, IfName: ifname})
		}
		return answer{}, cni.GCNetworkList(ctx, list, &args)
	}
	return answer{}, fmt.Errorf("%s is not a verb", verb)
}

func main() {
	result, err := call(os.Args[1], os.Args[2], os.Args[3], os.Args[4:])
	if err != nil {
		result.Result = nil
		result.Error = err.Error()
		var known *types.Error
		if errors.As(err, &known) {
			result.Code = known.Code
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
}
